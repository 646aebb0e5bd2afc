//! The front as the Python module `trimtab_extproc._front`. Conversions only: what anything means is in
//! `trimtab-front`; who calls it is `native_front.py`.

use std::net::TcpStream;
use std::os::fd::{FromRawFd, OwnedFd};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use trimtab_front::{Code, Event, Message, Settings, Status, TlsConfig, frame, tls_config};

const HALF_CLOSED: u8 = 0;
const ENDED: u8 = 1;
const PAUSE: u8 = 2;
const RESUME: u8 = 3;

/// The server's side of TLS.
#[pyclass(frozen)]
struct Tls(TlsConfig);

#[pymethods]
impl Tls {
    #[new]
    fn new(certificate: &[u8], key: &[u8]) -> PyResult<Self> {
        tls_config(certificate, key).map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}

/// One connection, of the thread that made it.
#[pyclass(unsendable)]
struct Connection(trimtab_front::Connection);

#[pymethods]
impl Connection {
    /// Takes over the descriptor of a connected TCP socket.
    #[new]
    #[pyo3(signature = (descriptor, tls, *, message_bytes_max, gathered_bytes_max, streams_max))]
    fn new(
        descriptor: i32,
        tls: Option<PyRef<'_, Tls>>,
        message_bytes_max: usize,
        gathered_bytes_max: usize,
        streams_max: u32,
    ) -> PyResult<Self> {
        if descriptor < 0 {
            return Err(PyValueError::new_err("not a descriptor"));
        }
        // SAFETY: the caller has detached it from its own socket object, so that nobody else closes it.
        let socket = TcpStream::from(unsafe { OwnedFd::from_raw_fd(descriptor) });
        socket.set_nonblocking(true)?;
        let settings = Settings { message_bytes_max, gathered_bytes_max, streams_max };
        Ok(Self(trimtab_front::Connection::new(socket, tls.map(|tls| tls.0.clone()), settings)))
    }

    fn readable<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.0.readable();
        self.events(py)
    }

    fn writable<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.0.writable();
        self.events(py)
    }

    /// `(stream, bytes)`: send this message; `(stream, (code, text))`: end it; `(stream, PAUSE | RESUME)`.
    fn answer<'py>(&mut self, py: Python<'py>, answers: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyList>> {
        for answer in answers {
            let (id, what): (u32, Bound<'_, PyAny>) = answer.extract()?;
            if let Ok(message) = what.cast::<PyBytes>() {
                self.0.send(id, frame(message.as_bytes()));
            } else if let Ok((code, text)) = what.extract::<(u8, String)>() {
                self.0.finish(id, Status::new(Code(code), text));
            } else {
                match what.extract()? {
                    PAUSE => self.0.pause(id),
                    RESUME => self.0.resume(id),
                    _ => return Err(PyValueError::new_err("no such answer")),
                }
            }
        }
        self.0.run();
        self.events(py)
    }

    fn shut_down<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.0.shut_down();
        self.events(py)
    }

    fn ping<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.0.ping();
        self.events(py)
    }

    #[getter]
    fn is_pong_awaited(&self) -> bool {
        self.0.is_pong_awaited()
    }

    #[getter]
    fn is_blocked(&self) -> bool {
        self.0.is_blocked()
    }

    #[getter]
    fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Connection {
    /// `(stream, (path, timeout_s))`, `(stream, bytes)`, `(stream, HALF_CLOSED | ENDED)`.
    fn events<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let events = PyList::empty(py);
        for (id, event) in self.0.take_events() {
            let what = match event {
                Event::Message(message) => bytes(py, &message)?.into_any(),
                Event::Opened { path, timeout } => {
                    let timeout_s = timeout.map(|timeout| timeout.as_secs_f64());
                    (PyString::new(py, &path), timeout_s).into_pyobject(py)?.into_any()
                }
                Event::HalfClosed => HALF_CLOSED.into_pyobject(py)?.into_any(),
                Event::Ended => ENDED.into_pyobject(py)?.into_any(),
            };
            events.append(PyTuple::new(py, [id.into_pyobject(py)?.into_any(), what])?)?;
        }
        Ok(events)
    }
}

fn bytes<'py>(py: Python<'py>, message: &Message) -> PyResult<Bound<'py, PyBytes>> {
    PyBytes::new_with(py, message.size_bytes(), |target| {
        message.copy_to(target);
        Ok(())
    })
}

const REQUEST_HEADERS: u8 = 0;
const REQUEST_BODY: u8 = 1;
const RESPONSE_HEADERS: u8 = 2;
const RESPONSE_BODY: u8 = 3;

/// One message of a gateway: which it is (a number above) and what it says; None: the full reader has to look at it.
#[pyfunction]
fn read_message<'py>(py: Python<'py>, message: &[u8]) -> PyResult<Option<Bound<'py, PyTuple>>> {
    let told = match trimtab_wire::read(message) {
        None => return Ok(None),
        Some(trimtab_wire::Message::RequestHeaders { headers, end_of_stream, modes, is_usual_untold }) => {
            (REQUEST_HEADERS, dict(py, &headers)?, end_of_stream, modes, is_usual_untold).into_pyobject(py)?
        }
        Some(trimtab_wire::Message::RequestBody { body, end_of_stream, head, modes, is_usual_untold }) => {
            let head = head.map(|headers| dict(py, &headers)).transpose()?;
            (REQUEST_BODY, PyBytes::new(py, body), end_of_stream, head, modes, is_usual_untold).into_pyobject(py)?
        }
        Some(trimtab_wire::Message::ResponseHeaders { headers, end_of_stream, modes }) => {
            (RESPONSE_HEADERS, dict(py, &headers)?, end_of_stream, modes).into_pyobject(py)?
        }
        Some(trimtab_wire::Message::ResponseBody { body, end_of_stream }) => {
            (RESPONSE_BODY, PyBytes::new(py, body), end_of_stream).into_pyobject(py)?
        }
    };
    Ok(Some(told))
}

fn dict<'py>(py: Python<'py>, headers: &trimtab_wire::Headers<'_>) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (name, value) in headers {
        dict.set_item(PyString::intern(py, name), PyString::new(py, value))?;
    }
    Ok(dict)
}

#[pymodule]
fn _front(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Connection>()?;
    module.add_class::<Tls>()?;
    module.add_function(wrap_pyfunction!(read_message, module)?)?;
    for (name, value) in [("HALF_CLOSED", HALF_CLOSED), ("ENDED", ENDED), ("PAUSE", PAUSE), ("RESUME", RESUME)] {
        module.add(name, value)?;
    }
    Ok(())
}
