//! One connection: its socket, its streams, and the turns that its owner gives it.
//!
//! The one rule: all work is done inside a call of the owner, until nothing is left that could go on without the peer.
//! `h2` speaks HTTP/2; pings of the peer are answered however many they are.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::poll_fn;
use std::net::TcpStream;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_executor::{LocalPool, LocalSpawner};
use futures_task::LocalSpawn;
use h2::{Ping, PingPong, server};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

use crate::head;
use crate::socket::{Socket, Watch};
use crate::status::{Status, not_grpc};
use crate::stream::{Event, Stream, Wishes};
use crate::tls::TlsConfig;

/// What a stream's peer may send before the owner has read it.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
const FRAME_BYTES_MAX: u32 = 64 << 10;
const HEADERS_BYTES_MAX: u32 = 64 << 10;
/// What `h2` keeps of a stream until the peer takes it.
const SEND_BYTES_MAX: usize = 1 << 20;
/// Clients that leave reset their streams, at any rate; the library takes more than a few at once for an attack.
const RESETS_MAX: usize = 4_096;

/// Bounds of one connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// A larger message ends its stream with RESOURCE_EXHAUSTED.
    pub message_bytes_max: usize,
    /// Bytes of incomplete messages of all streams; the stream that passes it ends with RESOURCE_EXHAUSTED.
    pub gathered_bytes_max: usize,
    /// Streams at once; the peer is told.
    pub streams_max: u32,
}

/// What the tasks of a connection share.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    pub(crate) gathered_bytes: Cell<usize>,
    events: RefCell<Vec<(u32, Event)>>,
    /// The streams that the owner may still speak to.
    streams: RefCell<HashMap<u32, Rc<Wishes>>>,
    driver: RefCell<Option<Waker>>,
    is_leaving: Cell<bool>,
    ping: Cell<PingState>,
    is_closed: Cell<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PingState {
    None,
    Wanted,
    Sent,
}

impl Shared {
    pub(crate) fn push(&self, id: u32, event: Event) {
        self.events.borrow_mut().push((id, event));
    }

    /// The stream has ended; the owner hears of it unless it ended it itself.
    pub(crate) fn push_end(&self, id: u32) {
        if self.streams.borrow_mut().remove(&id).is_some() {
            self.push(id, Event::Ended);
        }
    }

    fn wake_driver(&self) {
        if let Some(waker) = self.driver.take() {
            waker.wake();
        }
    }
}

/// One connection. Every call but the questions returns with the work done; `take_events` has what came of it.
pub struct Connection {
    pool: LocalPool,
    watch: Rc<Watch>,
    shared: Rc<Shared>,
    /// Kept until the owner lets go of the connection, so that the number which it watches is not given to another.
    _socket: Rc<TcpStream>,
}

impl Connection {
    /// Serves on a socket that does not block.
    #[must_use]
    pub fn new(socket: TcpStream, tls: Option<TlsConfig>, settings: Settings) -> Self {
        let (pool, watch, socket) = (LocalPool::new(), Rc::new(Watch::default()), Rc::new(socket));
        let shared = Rc::new(Shared {
            settings,
            gathered_bytes: Cell::new(0),
            events: RefCell::default(),
            streams: RefCell::default(),
            driver: RefCell::default(),
            is_leaving: Cell::new(false),
            ping: Cell::new(PingState::None),
            is_closed: Cell::new(false),
        });
        let io = Socket::new(Rc::clone(&socket), Rc::clone(&watch));
        let (spawner, driven) = (pool.spawner(), Rc::clone(&shared));
        spawn(&pool.spawner(), async move {
            match tls {
                Some(config) => {
                    // A peer that speaks no TLS has said nothing that could be answered.
                    if let Ok(io) = TlsAcceptor::from(config).accept(io).await {
                        serve(io, &driven, &spawner).await;
                    }
                }
                None => serve(io, &driven, &spawner).await,
            }
            driven.is_closed.set(true);
        });
        Self { pool, watch, shared, _socket: socket }
    }

    /// The socket may have bytes.
    pub fn readable(&mut self) {
        self.watch.readable();
        self.pool.run_until_stalled();
    }

    /// The socket may have room again.
    pub fn writable(&mut self) {
        self.watch.writable();
        self.pool.run_until_stalled();
    }

    /// Does what the calls below asked for.
    pub fn run(&mut self) {
        self.pool.run_until_stalled();
    }

    /// Sends a framed message. Of a stream that has ended meanwhile it is dropped, here and below.
    pub fn send(&mut self, id: u32, framed: Bytes) {
        if let Some(wishes) = self.shared.streams.borrow().get(&id) {
            wishes.messages.borrow_mut().push_back(framed);
            wishes.wake();
        }
    }

    /// Ends a stream once all messages are sent.
    pub fn finish(&mut self, id: u32, status: Status) {
        if let Some(wishes) = self.shared.streams.borrow_mut().remove(&id) {
            wishes.status.replace(Some(status));
            wishes.wake();
        }
    }

    /// Reads no more of a stream until `resume`. Events that are there already come all the same.
    pub fn pause(&mut self, id: u32) {
        if let Some(wishes) = self.shared.streams.borrow().get(&id) {
            wishes.is_paused.set(true);
        }
    }

    pub fn resume(&mut self, id: u32) {
        if let Some(wishes) = self.shared.streams.borrow().get(&id) {
            wishes.is_paused.set(false);
            wishes.wake();
        }
    }

    /// Tells the peer to open no more streams (GOAWAY); the connection closes when the last one has ended.
    pub fn shut_down(&mut self) {
        self.shared.is_leaving.set(true);
        self.shared.wake_driver();
        self.run();
    }

    /// Sends a ping, unless one is on its way.
    pub fn ping(&mut self) {
        if self.shared.ping.get() == PingState::None {
            self.shared.ping.set(PingState::Wanted);
            self.shared.wake_driver();
            self.run();
        }
    }

    /// Whether the answer to a ping is still to come.
    #[must_use]
    pub fn is_pong_awaited(&self) -> bool {
        self.shared.ping.get() != PingState::None
    }

    /// What has happened since the last call, in order.
    #[must_use]
    pub fn take_events(&mut self) -> Vec<(u32, Event)> {
        self.shared.events.take()
    }

    /// Whether the owner has to call `writable` once the socket has room.
    #[must_use]
    pub fn is_blocked(&self) -> bool {
        self.watch.is_blocked()
    }

    /// Whether it is over: let go of it.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed.get()
    }
}

fn spawn(spawner: &LocalSpawner, task: impl Future<Output = ()> + 'static) {
    // It fails only once the pool is gone, and with it whoever could spawn.
    let _ = spawner.spawn_local_obj(Box::new(task).into());
}

/// Until the connection is over, for whatever reason: the streams' own ends say all that their owner needs to know.
async fn serve<T: AsyncRead + AsyncWrite + Unpin>(io: T, shared: &Rc<Shared>, spawner: &LocalSpawner) {
    let handshake = server::Builder::new()
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .max_header_list_size(HEADERS_BYTES_MAX)
        .max_concurrent_streams(shared.settings.streams_max)
        .max_send_buffer_size(SEND_BYTES_MAX)
        .max_concurrent_reset_streams(RESETS_MAX)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_local_error_reset_streams(Some(RESETS_MAX))
        .handshake::<_, Bytes>(io);
    let Ok(mut connection) = handshake.await else { return };
    let mut pinger = connection.ping_pong();
    let mut is_leaving = false;
    poll_fn(|context| {
        shared.driver.replace(Some(context.waker().clone()));
        if shared.is_leaving.get() && !is_leaving {
            is_leaving = true;
            connection.graceful_shutdown();
        }
        if let Some(pinger) = &mut pinger {
            ping(pinger, shared, context);
        }
        loop {
            match connection.poll_accept(context) {
                Poll::Ready(Some(Ok((request, respond)))) => open(request, respond, shared, spawner),
                Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
                Poll::Pending => return Poll::Pending,
            }
        }
    })
    .await;
}

fn ping(pinger: &mut PingPong, shared: &Shared, context: &mut Context<'_>) {
    if shared.ping.get() == PingState::Wanted && pinger.send_ping(Ping::opaque()).is_ok() {
        shared.ping.set(PingState::Sent);
    }
    if shared.ping.get() == PingState::Sent && pinger.poll_pong(context).is_ready() {
        shared.ping.set(PingState::None);
    }
}

fn open(
    request: http::Request<h2::RecvStream>,
    mut respond: server::SendResponse<Bytes>,
    shared: &Rc<Shared>,
    spawner: &LocalSpawner,
) {
    let id = respond.stream_id().as_u32();
    let (parts, incoming) = request.into_parts();
    match head::read(&parts) {
        Ok((path, timeout)) => {
            let wishes = Rc::new(Wishes::default());
            shared.streams.borrow_mut().insert(id, Rc::clone(&wishes));
            shared.push(id, Event::Opened { path, timeout });
            spawn(spawner, Stream::new(id, incoming, respond, wishes, Rc::clone(shared)));
        }
        Err(status) => {
            // If the peer is gone there is nobody to be told.
            let _ = respond.send_response(not_grpc(status), true);
        }
    }
}
