//! The gRPC server of Trimtab's picker, one connection at a time: HTTP/2 (`h2`), TLS (`rustls`) and message framing.
//!
//! The one rule: it never waits. An event loop outside watches the socket and says when it can be read or written; each
//! such call does all that can be done at once and leaves events (a stream was opened, a message came, a stream ended).
//! The loop's owner answers with messages and statuses. It knows no method and no message: those are bytes here.

mod connection;
mod framing;
mod head;
mod socket;
mod status;
mod stream;
mod tls;

pub use connection::{Connection, Settings};
pub use framing::{Message, frame};
pub use status::{Code, Status};
pub use stream::Event;
pub use tls::{BadCertificate, TlsConfig, tls_config};
