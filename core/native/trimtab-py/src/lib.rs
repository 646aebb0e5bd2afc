//! The native core as the Python module `trimtab_core._native`. Conversions only: what anything means is in
//! `trimtab-core`, and what it must equal is the Python package around it.

mod block_chains;
mod placement;
mod scheduler;

use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static INVARIANT_ERROR: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
static NO_IDS: PyOnceLock<Py<PyArray1<u64>>> = PyOnceLock::new();

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

/// `elements` of an argument, without entering it in the table of borrowed arrays, which costs more than a small batch.
pub(crate) fn elements_of<'a, T: numpy::Element + Copy>(
    array: &'a Bound<'_, PyArray1<T>>,
    copy: &'a mut Vec<T>,
) -> &'a [T] {
    if array.is_contiguous() {
        // SAFETY: contiguous, and no Python code runs (nor any other thread: the interpreter is held) while the callers
        // use the slice, so nobody writes to it.
        if let Ok(slice) = unsafe { array.as_slice() } {
            return slice;
        }
    }
    copy.extend(array.readonly().as_array().iter().copied());
    copy
}

/// An array for the answer that is nearly always given: no ids.
pub(crate) fn ids(py: Python<'_>, ids: Vec<u64>) -> Bound<'_, PyArray1<u64>> {
    if ids.is_empty() {
        return NO_IDS.get_or_init(py, || PyArray1::from_vec(py, Vec::new()).unbind()).bind(py).clone();
    }
    PyArray1::from_vec(py, ids)
}

/// A class (or function) of the Python package, looked up once.
pub(crate) fn python_class<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyAny>>,
    module: &str,
    name: &str,
) -> PyResult<&'py Bound<'py, PyAny>> {
    Ok(cell.get_or_try_init(py, || py.import(module)?.getattr(name).map(Bound::unbind))?.bind(py))
}

pub(crate) fn invariant_error(py: Python<'_>, message: String) -> PyErr {
    match python_class(py, &INVARIANT_ERROR, "trimtab_core.errors", "InvariantError")
        .and_then(|class| class.call1((message,)))
    {
        Ok(value) => PyErr::from_value(value),
        Err(error) => error,
    }
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(hash_chunks, m)?)?;
    m.add_class::<block_chains::BlockChains>()?;
    m.add_class::<scheduler::Scheduler>()?;
    m.add_class::<placement::Placement>()?;
    Ok(())
}
