//! The scheduler as Python sees it: the surface of `trimtab_core.scheduler.Scheduler`.

use numpy::PyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyFrozenSet, PyTuple};
use trimtab_core::extra_terms::{ExtraTerms, ORDINARY_MILLI};
use trimtab_core::hotspot::HotspotSettings;
use trimtab_core::policies::Policy;
use trimtab_core::scheduler::{self as core, Refusal, UnknownSlot};
use trimtab_core::settings::Settings;

use crate::placement::Placement;
use crate::{elements_of, ids, invariant_error, python_class};

static UNKNOWN_SLOT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static REJECTION: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static RECORD: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static LOAD_VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static HOTSPOT: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static HOTSPOT_VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

fn unknown_slot(py: Python<'_>, error: &UnknownSlot) -> PyErr {
    let message = format!("slot {} is not in use", error.0);
    match python_class(py, &UNKNOWN_SLOT, "trimtab_core.errors", "UnknownSlot")
        .and_then(|class| class.call1((message,)))
    {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

fn array<T: numpy::Element>(value: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyArray1<T>>> {
    Ok(value.cast_into::<PyArray1<T>>()?)
}

/// One rendering of a prompt; its chain is copied only where it is not contiguous.
struct Rendering<'py> {
    chain: Bound<'py, PyArray1<u64>>,
    copy: Vec<u64>,
    size_bytes: i64,
    tokens: Option<i64>,
}

impl<'py> Rendering<'py> {
    fn of(prompt: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = prompt.py();
        Ok(Self {
            chain: array(prompt.getattr(pyo3::intern!(py, "chain"))?)?,
            copy: Vec::new(),
            size_bytes: prompt.getattr(pyo3::intern!(py, "size_bytes"))?.extract()?,
            tokens: prompt.getattr(pyo3::intern!(py, "tokens"))?.extract()?,
        })
    }

    fn prompt(&mut self) -> core::Prompt<'_> {
        let chain = elements_of(&self.chain, &mut self.copy);
        core::Prompt { chain, size_bytes: self.size_bytes, tokens: self.tokens }
    }
}

/// What `trimtab_core.extra_terms.ExtraTerms` has; its arrays are copied only where they are not contiguous.
struct Extra<'py> {
    weight_milli: i64,
    log_above_tokens: f64,
    expert_factor: Option<Bound<'py, PyArray1<f64>>>,
    rtt_s: Option<Bound<'py, PyArray1<f64>>>,
    copies: [Vec<f64>; 2],
}

impl<'py> Extra<'py> {
    fn of(extra: &Bound<'py, PyAny>) -> PyResult<Self> {
        let py = extra.py();
        let copies = [Vec::new(), Vec::new()];
        if extra.is_none() {
            let weight_milli = ORDINARY_MILLI;
            return Ok(Self { weight_milli, log_above_tokens: 0.0, expert_factor: None, rtt_s: None, copies });
        }
        let of_slots = |name| {
            let value = extra.getattr(name)?;
            if value.is_none() { Ok(None) } else { array::<f64>(value).map(Some) }
        };
        Ok(Self {
            weight_milli: extra.getattr(pyo3::intern!(py, "weight_milli"))?.extract()?,
            log_above_tokens: extra.getattr(pyo3::intern!(py, "log_above_tokens"))?.extract()?,
            expert_factor: of_slots(pyo3::intern!(py, "expert_factor"))?,
            rtt_s: of_slots(pyo3::intern!(py, "rtt_s"))?,
            copies,
        })
    }

    fn terms(&mut self, slots: usize) -> ExtraTerms<'_> {
        let [factors, trips] = &mut self.copies;
        let of_slots = |values: &'_ [f64]| values.len().min(slots);
        let expert_factor = self.expert_factor.as_ref().map_or(&[][..], |values| elements_of(values, factors));
        let rtt_s = self.rtt_s.as_ref().map_or(&[][..], |values| elements_of(values, trips));
        ExtraTerms {
            expert_factor: &expert_factor[..of_slots(expert_factor)],
            rtt_s: &rtt_s[..of_slots(rtt_s)],
            log_above_tokens: self.log_above_tokens,
        }
    }
}

#[pyclass(module = "trimtab_core._native")]
pub struct Scheduler {
    core: core::Scheduler,
    settings: Py<PyAny>,
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (*, rng_seed, settings))]
    fn new(rng_seed: &Bound<'_, PyAny>, settings: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mask = 0xFFFF_FFFF_FFFF_FFFFu64.into_pyobject(settings.py())?;
        let seed: u64 = rng_seed.bitand(mask)?.extract()?;
        let of = |name: &str| settings.getattr(name);
        let parsed = Settings {
            block_tokens: of("block_tokens")?.extract()?,
            kv_capacity_tokens: of("kv_capacity_tokens")?.extract()?,
            prefill_rate: of("prefill_rate")?.extract()?,
            prefill_rate_memory_s: of("prefill_rate_memory_s")?.extract()?,
            grace_s: of("grace_s")?.extract()?,
            late_signal_factor: of("late_signal_factor")?.extract()?,
            late_signal_s: of("late_signal_s")?.extract()?,
            speculative_chunks_max: of("speculative_chunks_max")?.extract()?,
            reservations_max: of("reservations_max")?.extract()?,
            retry_after_s: of("retry_after_s")?.extract()?,
        };
        Ok(Self { core: core::Scheduler::new(seed, parsed), settings: settings.clone().unbind() })
    }

    #[getter]
    fn settings(&self, py: Python<'_>) -> Py<PyAny> {
        self.settings.clone_ref(py)
    }

    #[getter]
    fn slot_count(&self) -> usize {
        self.core.slot_count()
    }

    fn add_slot(&mut self) -> u32 {
        self.core.add_slot()
    }

    fn remove_slot(&mut self, py: Python<'_>, slot: i64) -> PyResult<()> {
        self.core.remove_slot(slot).map_err(|e| unknown_slot(py, &e))
    }

    fn kv_apply<'py>(
        &mut self,
        py: Python<'py>,
        slot: i64,
        added: &Bound<'py, PyArray1<u64>>,
        tokens: &Bound<'py, PyArray1<u32>>,
        removed: &Bound<'py, PyArray1<u64>>,
        now_s: f64,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let (mut a, mut t, mut r) = (Vec::new(), Vec::new(), Vec::new());
        let (added, tokens) = paired(elements_of(added, &mut a), elements_of(tokens, &mut t))?;
        let seen = self.core.kv_apply(slot, added, tokens, elements_of(removed, &mut r), now_s);
        Ok(ids(py, seen.map_err(|e| unknown_slot(py, &e))?))
    }

    fn kv_replace<'py>(
        &mut self,
        py: Python<'py>,
        slot: i64,
        hashes: &Bound<'py, PyArray1<u64>>,
        tokens: &Bound<'py, PyArray1<u32>>,
        now_s: f64,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let (mut h, mut t) = (Vec::new(), Vec::new());
        let (hashes, tokens) = paired(elements_of(hashes, &mut h), elements_of(tokens, &mut t))?;
        let seen = self.core.kv_replace(slot, hashes, tokens, now_s).map_err(|e| unknown_slot(py, &e))?;
        Ok(ids(py, seen))
    }

    fn kv_clear(&mut self, py: Python<'_>, slot: i64) -> PyResult<()> {
        self.core.kv_clear(slot).map_err(|e| unknown_slot(py, &e))
    }

    #[allow(clippy::type_complexity)] // two arrays
    fn kv_export<'py>(
        &self,
        py: Python<'py>,
        slot: i64,
    ) -> PyResult<(Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>)> {
        let (hashes, tokens) = self.core.kv_export(slot).map_err(|e| unknown_slot(py, &e))?.into_iter().unzip();
        Ok((PyArray1::from_vec(py, hashes), PyArray1::from_vec(py, tokens)))
    }

    #[pyo3(signature = (slot, *, requests, block_tokens, kv_capacity_tokens, now_s))]
    fn report(
        &mut self,
        py: Python<'_>,
        slot: i64,
        requests: i64,
        block_tokens: i64,
        kv_capacity_tokens: i64,
        now_s: f64,
    ) -> PyResult<()> {
        let _ = now_s;
        self.core.report(slot, requests, block_tokens, kv_capacity_tokens).map_err(|e| unknown_slot(py, &e))
    }

    fn place(&mut self, py: Python<'_>, request: &Bound<'_, PyAny>, now_s: f64) -> PyResult<Py<PyAny>> {
        let of = |name| request.getattr(name);
        let name: String = of(pyo3::intern!(py, "policy"))?.extract()?;
        let policy = Policy::named(&name).ok_or_else(|| pyo3::exceptions::PyKeyError::new_err(name))?;
        let variant_of_slot = array::<i8>(of(pyo3::intern!(py, "variant_of_slot"))?)?;
        let exact = array::<bool>(of(pyo3::intern!(py, "exact"))?)?;
        let candidates = array::<bool>(of(pyo3::intern!(py, "candidates"))?)?;
        let prompts = of(pyo3::intern!(py, "prompts"))?;
        let prompts = prompts.cast::<PyTuple>()?;
        let mut arrays: Vec<Vec<Rendering<'_>>> = Vec::with_capacity(prompts.len());
        for renderings in prompts.iter() {
            let renderings = renderings.cast_into::<PyTuple>()?;
            arrays.push(renderings.iter().map(|prompt| Rendering::of(&prompt)).collect::<PyResult<_>>()?);
        }
        let tokens_per_byte: f64 = of(pyo3::intern!(py, "tokens_per_byte"))?.extract()?;
        let batch: i64 = of(pyo3::intern!(py, "batch"))?.extract()?;
        let cache_reads: bool = of(pyo3::intern!(py, "cache_reads"))?.extract()?;
        let batch_max: Option<i64> = of(pyo3::intern!(py, "batch_max"))?.extract()?;
        let is_again: bool = of(pyo3::intern!(py, "is_again"))?.extract()?;
        let mut extra = Extra::of(&of(pyo3::intern!(py, "extra"))?)?;
        // From here on no Python code runs, so the arrays may be looked into.
        let (mut v, mut e, mut c) = (Vec::new(), Vec::new(), Vec::new());
        let parsed = core::Request {
            prompts: arrays.iter_mut().map(|variants| variants.iter_mut().map(Rendering::prompt).collect()).collect(),
            variant_of_slot: elements_of(&variant_of_slot, &mut v),
            exact: elements_of(&exact, &mut e),
            candidates: elements_of(&candidates, &mut c),
            tokens_per_byte,
            batch,
            cache_reads,
            policy,
            batch_max,
            weight_milli: extra.weight_milli,
            extra: extra.terms(self.core.slot_count()),
            is_again,
        };
        match self.core.place(&parsed, now_s) {
            Ok(placement) => Ok(Placement::new(placement).into_pyobject(py)?.into_any().unbind()),
            Err(refusal) => {
                let reason = match refusal {
                    Refusal::NoEndpoints => "no_endpoints",
                    Refusal::TooManyOpen => "too_many_open",
                    Refusal::EndpointsFull => "endpoints_full",
                };
                let fields = PyDict::new(py);
                fields.set_item("reason", reason)?;
                fields.set_item("retry_after_s", self.core.settings.retry_after_s)?;
                let class = python_class(py, &REJECTION, "trimtab_core.placement", "Rejection")?;
                Ok(class.call((), Some(&fields))?.unbind())
            }
        }
    }

    fn first_token(&mut self, reservation_id: u64, now_s: f64) -> bool {
        self.core.first_token(reservation_id, now_s)
    }

    #[pyo3(name = "move")]
    fn move_to(&mut self, reservation_id: u64, slot: i64, now_s: f64) -> bool {
        self.core.move_to(reservation_id, slot, now_s)
    }

    fn finish(&mut self, reservation_id: u64, now_s: f64) -> bool {
        self.core.finish(reservation_id, now_s)
    }

    fn open_reservations<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let class = python_class(py, &RECORD, "trimtab_core.placement", "ReservationRecord")?;
        self.core
            .open_reservations()
            .map(|(reservation, has_claim)| {
                let fields = PyDict::new(py);
                fields.set_item("reservation_id", reservation.key.1)?;
                fields.set_item("slot", reservation.slot)?;
                fields.set_item("p_tokens", if reservation.is_queued { reservation.p_tokens } else { 0 })?;
                fields.set_item("batch", reservation.batch)?;
                fields.set_item("weight_milli", reservation.weight_milli)?;
                let hashes: &[u64] = if has_claim { &reservation.sample_hashes } else { &[] };
                let tokens: &[u32] = if has_claim { &reservation.sample_tokens } else { &[] };
                fields.set_item("sample_hashes", PyArray1::from_slice(py, hashes))?;
                fields.set_item("sample_tokens", PyArray1::from_slice(py, tokens))?;
                class.call((), Some(&fields))
            })
            .collect()
    }

    fn advance<'py>(&mut self, py: Python<'py>, now_s: f64) -> Bound<'py, PyArray1<u64>> {
        ids(py, self.core.advance(now_s))
    }

    #[allow(clippy::too_many_arguments)] // the fields of one entry of the load log
    #[pyo3(signature = (incarnation, reservation_id, slot, p_tokens, batch, sample_hashes, sample_tokens, now_s, weight_milli=1000))]
    fn peer_reserve(
        &mut self,
        incarnation: u64,
        reservation_id: u64,
        slot: i64,
        p_tokens: i64,
        batch: i64,
        sample_hashes: &Bound<'_, PyArray1<u64>>,
        sample_tokens: &Bound<'_, PyArray1<u32>>,
        now_s: f64,
        weight_milli: i64,
    ) -> PyResult<()> {
        let (mut h, mut t) = (Vec::new(), Vec::new());
        let (hashes, tokens) = paired(elements_of(sample_hashes, &mut h), elements_of(sample_tokens, &mut t))?;
        self.core.peer_reserve(incarnation, reservation_id, slot, p_tokens, batch, hashes, tokens, now_s, weight_milli);
        Ok(())
    }

    fn peer_first_token(&mut self, incarnation: u64, reservation_id: u64, now_s: f64) {
        self.core.peer_first_token(incarnation, reservation_id, now_s);
    }

    fn peer_move(&mut self, incarnation: u64, reservation_id: u64, slot: i64, now_s: f64) {
        self.core.peer_move(incarnation, reservation_id, slot, now_s);
    }

    fn peer_finish(&mut self, incarnation: u64, reservation_id: u64, now_s: f64) {
        self.core.peer_finish(incarnation, reservation_id, now_s);
    }

    fn peer_drop(&mut self, incarnation: u64, now_s: f64) {
        self.core.peer_drop(incarnation, now_s);
    }

    fn watch_hotspots(&mut self, settings: &Bound<'_, PyAny>) -> PyResult<()> {
        let parsed = if settings.is_none() {
            None
        } else {
            let (window_s, acts) = (settings.getattr("window_s")?.extract()?, settings.getattr("acts")?.extract()?);
            Some(HotspotSettings { window_s, acts })
        };
        self.core.watch_hotspots(parsed);
        Ok(())
    }

    fn hotspots<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let detector = self.core.hotspots();
        let class = python_class(py, &HOTSPOT, "trimtab_core.hotspot", "Hotspot")?;
        let hotspots = detector.hotspots().map(|hotspot| {
            let fields = PyDict::new(py);
            fields.set_item("prefix_class", hotspot.prefix_class)?;
            fields.set_item("since_s", hotspot.since_s)?;
            fields.set_item("came_s", hotspot.came_s)?;
            fields.set_item("is_acted_on", hotspot.is_acted_on)?;
            fields.set_item("holders", hotspot.holders)?;
            fields.set_item("others", hotspot.others)?;
            fields.set_item("in_class", hotspot.in_class)?;
            fields.set_item("arrivals", hotspot.arrivals)?;
            class.call((), Some(&fields))
        });
        let (raised, acted) = detector.counters();
        let fields = PyDict::new(py);
        fields.set_item("hotspots", PyTuple::new(py, hotspots.collect::<PyResult<Vec<_>>>()?)?)?;
        fields.set_item("arrivals", detector.arrivals().len())?;
        fields.set_item("prefixes", detector.arrivals().prefixes())?;
        fields.set_item("raised", raised)?;
        fields.set_item("acted", acted)?;
        python_class(py, &HOTSPOT_VIEW, "trimtab_core.hotspot", "HotspotView")?.call((), Some(&fields))
    }

    fn load<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let load = self.core.load();
        let fields = PyDict::new(py);
        fields.set_item("requests", PyArray1::from_slice(py, &load.requests))?;
        fields.set_item("external", PyArray1::from_slice(py, &load.external))?;
        fields.set_item("queued_tokens", PyArray1::from_slice(py, &load.queued_tokens))?;
        fields.set_item("prefill_rate", PyArray1::from_slice(py, &load.prefill_rate))?;
        fields.set_item("weight_milli", PyArray1::from_slice(py, &load.weight_milli))?;
        python_class(py, &LOAD_VIEW, "trimtab_core.placement", "LoadView")?.call((), Some(&fields))
    }

    fn index_size(&self) -> (usize, u64) {
        self.core.index_size()
    }

    #[allow(clippy::type_complexity)] // two arrays
    fn learned_export<'py>(
        &self,
        py: Python<'py>,
        slot: i64,
    ) -> PyResult<(Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<i64>>)> {
        let (chunks, costs) = self.core.learned_export(slot).map_err(|e| unknown_slot(py, &e))?.into_iter().unzip();
        Ok((PyArray1::from_vec(py, chunks), PyArray1::from_vec(py, costs)))
    }

    fn speculative_chunks(&self) -> usize {
        self.core.speculative_chunks()
    }

    fn replicas<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyFrozenSet>> {
        PyFrozenSet::new(py, self.core.replicas())
    }

    /// Memory of the index, bytes.
    fn index_bytes(&self) -> usize {
        self.core.index_bytes()
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.core.check().map_err(|message| invariant_error(py, message))
    }
}

fn paired<'a>(hashes: &'a [u64], tokens: &'a [u32]) -> PyResult<(&'a [u64], &'a [u32])> {
    if hashes.len() == tokens.len() {
        Ok((hashes, tokens))
    } else {
        Err(PyValueError::new_err(format!("{} hashes, but {} token counts", hashes.len(), tokens.len())))
    }
}
