//! A non-blocking socket under an event loop that somebody else runs.
//!
//! The one rule: whoever finds it not ready is woken by `Watch::readable` or `writable`, which the loop's owner calls.
//! A turn reads at most `TURN_BYTES_MAX`, so that one busy connection cannot keep the loop.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes read in one turn; the loop calls again as long as there are more.
const TURN_BYTES_MAX: usize = 128 << 10;
/// The least room that a read is given: frames of a busy connection come many at a time.
const READ_BYTES: usize = 64 << 10;

/// What the loop's owner and the socket tell each other.
#[derive(Default)]
pub(crate) struct Watch {
    reader: RefCell<Option<Waker>>,
    writer: RefCell<Option<Waker>>,
    budget: Cell<usize>,
    is_blocked: Cell<bool>,
}

impl Watch {
    /// The socket may have bytes.
    pub(crate) fn readable(&self) {
        self.budget.set(TURN_BYTES_MAX);
        if let Some(waker) = self.reader.take() {
            waker.wake();
        }
    }

    /// The socket may have room.
    pub(crate) fn writable(&self) {
        self.is_blocked.set(false);
        if let Some(waker) = self.writer.take() {
            waker.wake();
        }
    }

    /// Whether bytes wait for room in the socket: the loop has to say when there is some.
    pub(crate) fn is_blocked(&self) -> bool {
        self.is_blocked.get()
    }
}

pub(crate) struct Socket {
    inner: Rc<TcpStream>,
    watch: Rc<Watch>,
    /// Read ahead of whoever reads in small pieces: `ahead[taken..filled]`.
    ahead: Box<[u8]>,
    taken: usize,
    filled: usize,
}

impl Socket {
    pub(crate) fn new(inner: Rc<TcpStream>, watch: Rc<Watch>) -> Self {
        Self { inner, watch, ahead: vec![0; READ_BYTES].into(), taken: 0, filled: 0 }
    }

    /// One read, within the turn's budget.
    fn receive(&self, context: &Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        let budget = self.watch.budget.get();
        if budget == 0 {
            self.wait_for_bytes(context);
            return Poll::Pending;
        }
        loop {
            match (&*self.inner).read(buffer) {
                Ok(count) => {
                    // A read that does not fill its buffer has emptied the socket: asking again would only say so.
                    let is_more = count == buffer.len() || count == 0;
                    self.watch.budget.set(if is_more { budget.saturating_sub(count) } else { 0 });
                    return Poll::Ready(Ok(count));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for_bytes(context);
                    return Poll::Pending;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn wait_for_bytes(&self, context: &Context<'_>) {
        self.watch.reader.replace(Some(context.waker().clone()));
    }

    fn sent(&self, context: &Context<'_>, result: io::Result<usize>) -> Poll<io::Result<usize>> {
        match result {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.watch.is_blocked.set(true);
                self.watch.writer.replace(Some(context.waker().clone()));
                Poll::Pending
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
            result => Poll::Ready(result),
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.taken == this.filled {
            // Large readers read straight into their own memory.
            if buf.remaining() >= READ_BYTES {
                return this.receive(context, buf.initialize_unfilled()).map_ok(|count| buf.advance(count));
            }
            let mut ahead = std::mem::take(&mut this.ahead);
            let result = this.receive(context, &mut ahead);
            this.ahead = ahead;
            (this.taken, this.filled) = (0, 0);
            match result {
                Poll::Ready(Ok(count)) => this.filled = count,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        let count = buf.remaining().min(this.filled - this.taken);
        buf.put_slice(&this.ahead[this.taken..this.taken + count]);
        this.taken += count;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let result = (&*self.inner).write(data);
        self.sent(context, result)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = (&*self.inner).write_vectored(data);
        self.sent(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The other side may be gone already, which is as good.
        let _ = self.inner.shutdown(Shutdown::Write);
        Poll::Ready(Ok(()))
    }
}
