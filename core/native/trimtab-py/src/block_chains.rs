//! The block map as Python sees it: the surface of `trimtab_core.block_chains.BlockChains`.
//!
//! A checkpoint is written and read by `trimtab_core.chain_checkpoint`, so that both maps have one format.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict};
use trimtab_core::block_chains::{self as core, BlockRecord, Place};
use trimtab_core::token_table::TokenTable;

use crate::{elements, invariant_error, python_class};

static CHANGES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static CHECKPOINT_CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static WRITE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static READ: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static DATA_ERROR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

const CHECKPOINT: &str = "trimtab_core.chain_checkpoint";

type References = Vec<(String, i64, u32)>;
type Places = Vec<(String, i64)>;

#[pyclass(module = "trimtab_core._native")]
pub struct BlockChains {
    core: core::BlockChains,
    #[pyo3(get)]
    table: Py<PyAny>,
    #[pyo3(get)]
    seed: u64,
}

#[pymethods]
impl BlockChains {
    #[new]
    fn new(table: &Bound<'_, PyAny>, seed: u64) -> PyResult<Self> {
        let offsets: PyReadonlyArray1<u32> = table.getattr("offsets")?.extract()?;
        let invalid: PyReadonlyArray1<u32> = table.getattr("invalid")?.extract()?;
        let data = table.getattr("data")?;
        let data = data.cast::<PyBytes>()?.as_bytes().to_vec();
        let mut copy = Vec::new();
        let parsed = TokenTable::new(offsets.as_array().to_vec(), data, elements(&invalid, &mut copy))
            .ok_or_else(|| PyValueError::new_err("the token table contradicts itself"))?;
        Ok(Self { core: core::BlockChains::new(parsed, seed), table: table.clone().unbind(), seed })
    }

    #[getter]
    fn block_count(&self) -> usize {
        self.core.block_count()
    }
    #[getter]
    fn unconfirmed_count(&self) -> usize {
        self.core.unconfirmed_count()
    }
    #[getter]
    fn chunk_count(&self) -> usize {
        self.core.chunk_count()
    }
    #[getter]
    fn bytes_seen(&self) -> u64 {
        self.core.counters.bytes_seen
    }
    #[getter]
    fn tokens_seen(&self) -> u64 {
        self.core.counters.tokens_seen
    }
    #[getter]
    fn dropped_unknown_parent(&self) -> u64 {
        self.core.counters.dropped_unknown_parent
    }
    #[getter]
    fn dropped_unknown_token(&self) -> u64 {
        self.core.counters.dropped_unknown_token
    }
    #[getter]
    fn dropped_malformed(&self) -> u64 {
        self.core.counters.dropped_malformed
    }
    #[getter]
    fn dropped_full(&self) -> u64 {
        self.core.counters.dropped_full
    }

    #[pyo3(signature = (*, parent, blocks, tokens, block_tokens, root, medium="GPU", group=0))]
    #[allow(clippy::too_many_arguments)] // the fields of one event
    fn store(
        &mut self,
        parent: Option<u64>,
        blocks: PyReadonlyArray1<'_, u64>,
        tokens: PyReadonlyArray1<'_, u32>,
        block_tokens: i64,
        root: u64,
        medium: &str,
        group: i64,
    ) {
        let (mut b, mut t) = (Vec::new(), Vec::new());
        let place = self.core.place(medium, group);
        let (blocks, tokens) = (elements(&blocks, &mut b), elements(&tokens, &mut t));
        self.core.store(parent, blocks, tokens, block_tokens, root, place);
    }

    #[pyo3(signature = (*, blocks, medium="GPU", group=0))]
    fn remove(&mut self, blocks: PyReadonlyArray1<'_, u64>, medium: &str, group: i64) {
        let mut copy = Vec::new();
        let place = self.core.place(medium, group);
        self.core.remove(elements(&blocks, &mut copy), place);
    }

    fn clear(&mut self) {
        self.core.clear();
    }

    fn unpublish(&mut self) {
        self.core.unpublish();
    }

    fn drain<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let changes = self.core.drain();
        let fields = PyDict::new(py);
        fields.set_item("cleared", changes.cleared)?;
        fields.set_item("added", PyArray1::from_vec(py, changes.added))?;
        fields.set_item("tokens", PyArray1::from_vec(py, changes.tokens))?;
        fields.set_item("removed", PyArray1::from_vec(py, changes.removed))?;
        python_class(py, &CHANGES, "trimtab_core.block_chains", "ChunkChanges")?.call((), Some(&fields))
    }

    #[allow(clippy::type_complexity)] // two arrays
    fn chunks<'py>(&self, py: Python<'py>) -> (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>) {
        let (hashes, tokens) = self.core.chunks();
        (PyArray1::from_vec(py, hashes), PyArray1::from_vec(py, tokens))
    }

    fn dump<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let counters = self.core.counters;
        let mut columns = Columns::default();
        for record in self.core.records() {
            self.add(&mut columns, &record);
        }
        let fields = PyDict::new(py);
        fields.set_item("version", py.import(CHECKPOINT)?.getattr("VERSION")?)?;
        fields.set_item(
            "counters",
            (
                counters.bytes_seen,
                counters.tokens_seen,
                counters.dropped_unknown_parent,
                counters.dropped_unknown_token,
                counters.dropped_malformed,
                counters.dropped_full,
            ),
        )?;
        fields.set_item("held_max", self.core.held_max())?;
        fields.set_item("gaps", self.core.gaps())?;
        for (name, bytes) in [
            ("names", &columns.names),
            ("parents", &columns.parents),
            ("has_parent", &columns.has_parent),
            ("chains", &columns.chains),
            ("tokens", &columns.tokens),
            ("tail_sizes", &columns.tail_sizes),
            ("tails", &columns.tails),
            ("chunk_counts", &columns.chunk_counts),
            ("chunk_hashes", &columns.chunk_hashes),
            ("chunk_tokens", &columns.chunk_tokens),
            ("holding", &columns.holding),
            ("unconfirmed_since", &columns.unconfirmed_since),
        ] {
            fields.set_item(name, PyBytes::new(py, bytes))?;
        }
        fields.set_item("holdings", columns.holdings)?;
        let checkpoint = python_class(py, &CHECKPOINT_CLASS, CHECKPOINT, "Checkpoint")?.call((), Some(&fields))?;
        python_class(py, &WRITE, CHECKPOINT, "write")?.call1((checkpoint, &self.table, self.seed))
    }

    #[classmethod]
    fn load(
        _class: &Bound<'_, pyo3::types::PyType>,
        py: Python<'_>,
        table: &Bound<'_, PyAny>,
        seed: u64,
        data: &Bound<'_, PyBytes>,
    ) -> PyResult<Self> {
        let checkpoint = python_class(py, &READ, CHECKPOINT, "read")?.call1((table, seed, data))?;
        let mut chains = Self::new(table, seed)?;
        let is_whole = chains.restore(&checkpoint)?;
        if !is_whole {
            let class = python_class(py, &DATA_ERROR, "trimtab_core.errors", "DataError")?;
            return Err(PyErr::from_value(class.call1(("checkpoint: its columns contradict each other",))?));
        }
        chains.core.drain();
        Ok(chains)
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.core.check().map_err(|message| invariant_error(py, message))
    }
}

#[derive(Default)]
struct Columns {
    names: Vec<u8>,
    parents: Vec<u8>,
    has_parent: Vec<u8>,
    chains: Vec<u8>,
    tokens: Vec<u8>,
    tail_sizes: Vec<u8>,
    tails: Vec<u8>,
    chunk_counts: Vec<u8>,
    chunk_hashes: Vec<u8>,
    chunk_tokens: Vec<u8>,
    holdings: Vec<(References, Places)>,
    holding: Vec<u8>,
    unconfirmed_since: Vec<u8>,
}

impl BlockChains {
    fn add(&self, columns: &mut Columns, record: &BlockRecord<'_>) {
        columns.names.extend_from_slice(&record.name.to_le_bytes());
        columns.parents.extend_from_slice(&record.parent.unwrap_or(0).to_le_bytes());
        columns.has_parent.push(record.parent.is_some() as u8);
        columns.chains.extend_from_slice(&record.chain.to_le_bytes());
        columns.tokens.extend_from_slice(&record.tokens.to_le_bytes());
        columns.tail_sizes.push(record.tail.len() as u8);
        columns.tails.extend_from_slice(record.tail);
        columns.chunk_counts.extend_from_slice(&(record.chunks.len() as u32).to_le_bytes());
        for (chunk, tokens) in &record.chunks {
            columns.chunk_hashes.extend_from_slice(&chunk.to_le_bytes());
            columns.chunk_tokens.extend_from_slice(&tokens.to_le_bytes());
        }
        let name_of = |place: Place| {
            let (medium, group) = self.core.place_name(place);
            (medium.to_owned(), group)
        };
        let references: References =
            record.holding.0.iter().map(|&(place, count)| (name_of(place).0, name_of(place).1, count)).collect();
        let mut set_aside: Places = record.holding.1.iter().map(|&place| name_of(place)).collect();
        set_aside.sort_unstable();
        let holding = (references, set_aside);
        let at = columns.holdings.iter().position(|other| *other == holding).unwrap_or_else(|| {
            columns.holdings.push(holding);
            columns.holdings.len() - 1
        });
        columns.holding.extend_from_slice(&(at as u32).to_le_bytes());
        columns.unconfirmed_since.extend_from_slice(&record.unconfirmed_since.unwrap_or(0).to_le_bytes());
    }

    /// False where the columns do not fit each other.
    fn restore(&mut self, checkpoint: &Bound<'_, PyAny>) -> PyResult<bool> {
        let column = |name: &str| -> PyResult<Vec<u8>> { checkpoint.getattr(name)?.extract() };
        let [bytes_seen, tokens_seen, unknown_parent, unknown_token, malformed, full]: [u64; 6] =
            checkpoint.getattr("counters")?.extract::<Vec<u64>>()?.try_into().unwrap_or_default();
        self.core.counters = core::Counters {
            bytes_seen,
            tokens_seen,
            dropped_unknown_parent: unknown_parent,
            dropped_unknown_token: unknown_token,
            dropped_malformed: malformed,
            dropped_full: full,
        };
        let (held_max, gaps) = (checkpoint.getattr("held_max")?, checkpoint.getattr("gaps")?);
        self.core.restore_history(held_max.extract()?, gaps.extract()?);
        let holdings: Vec<(References, Places)> = checkpoint.getattr("holdings")?.extract()?;
        let holdings: Vec<core::Holding> = holdings
            .into_iter()
            .map(|(references, set_aside)| {
                let references =
                    references.iter().map(|(medium, group, count)| (self.core.place(medium, *group), *count)).collect();
                (references, set_aside.iter().map(|(medium, group)| self.core.place(medium, *group)).collect())
            })
            .collect();
        let names = words(&column("names")?);
        let (parents, has_parent, chains) =
            (words(&column("parents")?), column("has_parent")?, words(&column("chains")?));
        let (tokens, tail_sizes, tails) = (halves(&column("tokens")?), column("tail_sizes")?, column("tails")?);
        let (chunk_counts, holding) = (halves(&column("chunk_counts")?), halves(&column("holding")?));
        let unconfirmed_since = words(&column("unconfirmed_since")?);
        let (chunk_hashes, chunk_tokens) = (words(&column("chunk_hashes")?), halves(&column("chunk_tokens")?));
        let lengths = [
            parents.len(),
            has_parent.len(),
            chains.len(),
            tokens.len(),
            tail_sizes.len(),
            chunk_counts.len(),
            holding.len(),
            unconfirmed_since.len(),
        ];
        if lengths.iter().any(|&length| length != names.len()) || chunk_hashes.len() != chunk_tokens.len() {
            return Ok(false);
        }
        let (mut tail_at, mut chunk_at) = (0, 0);
        for at in 0..names.len() {
            let (tail_end, chunk_end) = (tail_at + tail_sizes[at] as usize, chunk_at + chunk_counts[at] as usize);
            let (Some(tail), Some(hashes), Some(counts), Some(holding)) = (
                tails.get(tail_at..tail_end),
                chunk_hashes.get(chunk_at..chunk_end),
                chunk_tokens.get(chunk_at..chunk_end),
                holdings.get(holding[at] as usize),
            ) else {
                return Ok(false);
            };
            let record = BlockRecord {
                name: names[at],
                parent: (has_parent[at] != 0).then_some(parents[at]),
                chain: chains[at],
                tokens: tokens[at],
                tail,
                chunks: hashes.iter().copied().zip(counts.iter().copied()).collect(),
                holding: holding.clone(),
                unconfirmed_since: (unconfirmed_since[at] != 0).then_some(unconfirmed_since[at]),
            };
            if !self.core.restore(record) {
                return Ok(false);
            }
            (tail_at, chunk_at) = (tail_end, chunk_end);
        }
        Ok(true)
    }
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| word.iter().rev().fold(0, |sum, &byte| sum << 8 | byte as u64)).collect()
}

fn halves(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|word| word.iter().rev().fold(0, |sum, &byte| sum << 8 | byte as u32)).collect()
}
