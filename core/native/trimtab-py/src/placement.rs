//! A placement as Python sees it; its arrays are made when they are asked for.

use numpy::PyArray1;
use pyo3::prelude::*;

/// A choice, and the reservation that was made with it; see `trimtab_core.placement.Placement`.
#[pyclass(frozen, module = "trimtab_core._native")]
pub struct Placement(pub trimtab_core::scheduler::Placement);

#[pymethods]
impl Placement {
    #[getter]
    fn reservation_id(&self) -> u64 {
        self.0.reservation_id
    }
    #[getter]
    fn slot(&self) -> u32 {
        self.0.slot
    }
    #[getter]
    fn alternatives<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, pyo3::types::PyTuple>> {
        pyo3::types::PyTuple::new(py, &self.0.alternatives)
    }
    #[getter]
    fn prompt_tokens(&self) -> i64 {
        self.0.prompt_tokens
    }
    #[getter]
    fn hit_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_slice(py, &self.0.hit_tokens)
    }
    #[getter]
    fn queued_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.0.queued_tokens)
    }
    #[getter]
    fn p_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.0.p_tokens)
    }
    #[getter]
    fn batch<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_slice(py, &self.0.batch)
    }
    #[getter]
    fn score<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, &self.0.score)
    }
    #[getter]
    fn p_own_tokens(&self) -> i64 {
        self.0.p_own_tokens
    }
    #[getter]
    fn reason(&self) -> String {
        format!("{}: {}", self.0.policy.name(), self.0.how.words())
    }
    #[getter]
    fn sample_hashes<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u64>> {
        PyArray1::from_slice(py, &self.0.sample_hashes)
    }
    #[getter]
    fn sample_tokens<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_slice(py, &self.0.sample_tokens)
    }
    fn __repr__(&self) -> String {
        format!("Placement(reservation_id={}, slot={}, {})", self.0.reservation_id, self.0.slot, self.reason())
    }
}
