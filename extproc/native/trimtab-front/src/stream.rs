//! One stream: its messages to the owner as events, the owner's answers to the peer.
//!
//! The one rule: the owner hears of each end exactly once, unless it ended the stream itself: after `HalfClosed` or
//! messages, `Ended` says that the peer reset it, the connection is gone, or what came was no gRPC.
//!
//! Backpressure: nothing more is read of a stream while the owner has paused it or while the peer does not take what is
//! to be sent, so the peer's window runs out. Incomplete messages of all streams together hold at most
//! `gathered_bytes_max` of each connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{RecvStream, SendStream};

use crate::connection::Shared;
use crate::framing::{Assembler, Message};
use crate::status::{Code, Status, response_head};

/// What happened on a stream.
#[derive(Debug)]
pub enum Event {
    /// It was opened: the method's path, and the time that the caller gives it.
    Opened { path: String, timeout: Option<Duration> },
    /// A message came.
    Message(Message),
    /// The peer sends no more; it waits for the status.
    HalfClosed,
    /// The stream is gone; nothing can be sent on it any more.
    Ended,
}

/// What the owner wants of a stream.
#[derive(Default)]
pub(crate) struct Wishes {
    pub(crate) messages: RefCell<VecDeque<Bytes>>,
    pub(crate) status: RefCell<Option<Status>>,
    pub(crate) is_paused: Cell<bool>,
    waker: RefCell<Option<Waker>>,
}

impl Wishes {
    pub(crate) fn wake(&self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

enum Sender {
    /// Not even the head of the response was sent.
    Silent(SendResponse<Bytes>),
    Talking(SendStream<Bytes>),
}

/// The peer's side is gone.
struct Gone;

pub(crate) struct Stream {
    id: u32,
    incoming: RecvStream,
    sender: Sender,
    assembler: Assembler,
    /// Of the assembler's bytes, as counted in `Shared`.
    gathered_bytes: usize,
    is_half_closed: bool,
    wishes: Rc<Wishes>,
    shared: Rc<Shared>,
}

impl Stream {
    pub(crate) fn new(
        id: u32,
        incoming: RecvStream,
        respond: SendResponse<Bytes>,
        wishes: Rc<Wishes>,
        shared: Rc<Shared>,
    ) -> Self {
        let assembler = Assembler::new(shared.settings.message_bytes_max);
        let sender = Sender::Silent(respond);
        Self { id, incoming, sender, assembler, gathered_bytes: 0, is_half_closed: false, wishes, shared }
    }

    fn is_reset(&mut self, context: &mut Context<'_>) -> bool {
        match &mut self.sender {
            Sender::Silent(respond) => respond.poll_reset(context).is_ready(),
            Sender::Talking(stream) => stream.poll_reset(context).is_ready(),
        }
    }

    /// Sends what the peer takes. Ready(Ok(true)): the status too, the stream is over.
    fn send(&mut self, context: &mut Context<'_>) -> Poll<Result<bool, Gone>> {
        let mut messages = self.wishes.messages.borrow_mut();
        while let Some(message) = messages.front_mut() {
            if let Sender::Silent(respond) = &mut self.sender {
                self.sender = Sender::Talking(respond.send_response(response_head(), false).map_err(|_| Gone)?);
            }
            let Sender::Talking(stream) = &mut self.sender else { return Poll::Ready(Err(Gone)) };
            stream.reserve_capacity(message.len());
            while stream.capacity() == 0 {
                match stream.poll_capacity(context) {
                    Poll::Ready(Some(Ok(_))) => {}
                    Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(Err(Gone)),
                    Poll::Pending => return Poll::Pending,
                }
            }
            let part = message.split_to(stream.capacity().min(message.len()));
            stream.send_data(part, false).map_err(|_| Gone)?;
            if message.is_empty() {
                messages.pop_front();
            }
        }
        let Some(status) = self.wishes.status.take() else { return Poll::Ready(Ok(false)) };
        let sent = match &mut self.sender {
            Sender::Silent(respond) => respond.send_response(status.trailers_only(), true).map(drop),
            Sender::Talking(stream) => stream.send_trailers(status.trailers()),
        };
        Poll::Ready(sent.map(|()| true).map_err(|_| Gone))
    }

    /// Reads the peer's bytes into events until there are none. Ready: the stream has to end so.
    fn receive(&mut self, context: &mut Context<'_>) -> Poll<Result<Status, Gone>> {
        loop {
            match self.assembler.next() {
                Ok(Some(message)) => {
                    self.shared.push(self.id, Event::Message(message));
                    continue;
                }
                Ok(None) => {}
                Err(status) => return Poll::Ready(Ok(status)),
            }
            match self.incoming.poll_data(context) {
                Poll::Ready(Some(Ok(data))) => {
                    // The window is for the pace of the connection; how much is held is bounded here.
                    if self.incoming.flow_control().release_capacity(data.len()).is_err() {
                        return Poll::Ready(Err(Gone));
                    }
                    self.assembler.push(data);
                }
                Poll::Ready(Some(Err(_))) => return Poll::Ready(Err(Gone)),
                Poll::Ready(None) if self.assembler.is_between_messages() => {
                    self.is_half_closed = true;
                    self.shared.push(self.id, Event::HalfClosed);
                    return Poll::Pending;
                }
                Poll::Ready(None) => return Poll::Ready(Ok(Status::new(Code::INTERNAL, "a message that breaks off"))),
                Poll::Pending => {
                    return if self.is_gathering_allowed() {
                        Poll::Pending
                    } else {
                        let text = "too many large messages are on their way";
                        Poll::Ready(Ok(Status::new(Code::RESOURCE_EXHAUSTED, text)))
                    };
                }
            }
        }
    }

    /// Counts what is held of incomplete messages.
    fn is_gathering_allowed(&mut self) -> bool {
        let held = self.assembler.held_bytes();
        let all = self.shared.gathered_bytes.get() - self.gathered_bytes + held;
        self.shared.gathered_bytes.set(all);
        self.gathered_bytes = held;
        all <= self.shared.settings.gathered_bytes_max || held == 0
    }
}

impl Future for Stream {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        this.wishes.waker.replace(Some(context.waker().clone()));
        if this.is_reset(context) {
            return this.over();
        }
        loop {
            match this.send(context) {
                Poll::Ready(Ok(true) | Err(Gone)) => return this.over(),
                // The peer reads nothing: so do we, of this stream.
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(false)) => {}
            }
            if this.is_half_closed || this.wishes.is_paused.get() {
                return Poll::Pending;
            }
            match this.receive(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(Gone)) => return this.over(),
                Poll::Ready(Ok(status)) => {
                    // The owner is told of its end, the peer of its fault.
                    this.shared.push_end(this.id);
                    this.wishes.status.replace(Some(status));
                }
            }
        }
    }
}

impl Stream {
    fn over(&mut self) -> Poll<()> {
        self.shared.push_end(self.id);
        Poll::Ready(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.gathered_bytes.set(self.shared.gathered_bytes.get() - self.gathered_bytes);
    }
}
