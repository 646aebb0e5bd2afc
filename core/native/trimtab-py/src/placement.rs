//! A placement as Python sees it; its arrays are made when they are first asked for.

use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use trimtab_core::scheduler as core;
use trimtab_core::terms::Terms;

/// A choice, and the reservation that was made with it; see `trimtab_core.placement.Placement`.
#[pyclass(frozen, module = "trimtab_core._native")]
pub struct Placement {
    core: core::Placement,
    hit_tokens: Array<i64>,
    queued_tokens: Array<f64>,
    p_tokens: Array<f64>,
    p_linear_tokens: Array<f64>,
    network_tokens: Array<f64>,
    expert_factor: Array<f64>,
    batch: Array<i64>,
    weighted_batch: Array<f64>,
    score: Array<f64>,
}

type Array<T> = PyOnceLock<Py<PyArray1<T>>>;

impl Placement {
    pub fn new(core: core::Placement) -> Self {
        Self {
            core,
            hit_tokens: PyOnceLock::new(),
            queued_tokens: PyOnceLock::new(),
            p_tokens: PyOnceLock::new(),
            p_linear_tokens: PyOnceLock::new(),
            network_tokens: PyOnceLock::new(),
            expert_factor: PyOnceLock::new(),
            batch: PyOnceLock::new(),
            weighted_batch: PyOnceLock::new(),
            score: PyOnceLock::new(),
        }
    }

    fn array<'py, T: numpy::Element>(
        &self,
        py: Python<'py>,
        array: &Array<T>,
        of: impl FnOnce(&Terms) -> Vec<T>,
    ) -> Bound<'py, PyArray1<T>> {
        array.get_or_init(py, || PyArray1::from_vec(py, of(&self.core.terms)).unbind()).bind(py).clone()
    }
}

#[pymethods]
impl Placement {
    #[getter]
    fn reservation_id(&self) -> u64 {
        self.core.reservation_id
    }
    #[getter]
    fn slot(&self) -> u32 {
        self.core.slot
    }
    #[getter]
    fn alternatives<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.core.alternatives)
    }
    #[getter]
    fn prompt_tokens(&self) -> i64 {
        self.core.prompt_tokens
    }
    #[getter]
    fn hit_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.array(py, &self.hit_tokens, Terms::hit_tokens)
    }
    #[getter]
    fn queued_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.queued_tokens, Terms::queued_tokens)
    }
    #[getter]
    fn p_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.p_tokens, Terms::p_tokens)
    }
    #[getter]
    fn p_linear_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.p_linear_tokens, Terms::p_linear_tokens)
    }
    #[getter]
    fn network_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.network_tokens, Terms::network_tokens)
    }
    #[getter]
    fn expert_factor<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.expert_factor, Terms::expert_factor)
    }
    #[getter]
    fn batch<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        self.array(py, &self.batch, Terms::batch)
    }
    #[getter]
    fn weighted_batch<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.weighted_batch, Terms::weighted_batch)
    }
    #[getter]
    fn score<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        self.array(py, &self.score, Terms::score)
    }
    #[getter]
    fn p_own_tokens(&self) -> i64 {
        self.core.p_own_tokens
    }
    #[getter]
    fn reason(&self) -> String {
        let away = if self.core.terms.left_out.is_some() { ", away from a hotspot" } else { "" };
        format!("{}: {}{away}", self.core.policy.name(), self.core.how.words())
    }
    #[getter]
    fn sample_hashes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.core.sample_hashes)
    }
    #[getter]
    fn sample_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_slice(py, &self.core.sample_tokens)
    }
    #[getter]
    fn hotspot(&self) -> Option<u64> {
        self.core.terms.left_out.as_ref().map(|left_out| left_out.prefix_class)
    }
    #[getter]
    fn left_out<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(
            py,
            self.core.terms.left_out.iter().flat_map(|left_out| left_out.slots.clone()).collect::<Vec<_>>(),
        )
    }
    fn __repr__(&self) -> String {
        format!("Placement(reservation_id={}, slot={}, {})", self.core.reservation_id, self.core.slot, self.reason())
    }
}
