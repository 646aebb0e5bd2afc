//! The native core as the Python module `trimtab_core._native`. Conversions only: what anything means is in
//! `trimtab-core`, and what it must equal is the Python package around it.

mod placement;
mod scheduler;

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

/// The chain of a whole prompt: `len(text) // 64` hashes.
#[pyfunction]
fn hash_chunks<'py>(py: Python<'py>, text: &[u8], root: u64, seed: u64) -> Bound<'py, PyArray1<u64>> {
    let mut chain = Vec::new();
    trimtab_core::chunks::extend_chain(root, text, seed, &mut chain);
    PyArray1::from_vec(py, chain)
}

/// The elements of a contiguous array, or of a copy of one that is not.
pub(crate) fn elements<'a, T: numpy::Element + Copy>(
    array: &'a PyReadonlyArray1<'_, T>,
    copy: &'a mut Vec<T>,
) -> &'a [T] {
    match array.as_slice() {
        Ok(slice) => slice,
        Err(_) => {
            copy.extend(array.as_array().iter().copied());
            copy
        }
    }
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(hash_chunks, m)?)?;
    m.add_class::<scheduler::Scheduler>()?;
    m.add_class::<placement::Placement>()?;
    Ok(())
}
