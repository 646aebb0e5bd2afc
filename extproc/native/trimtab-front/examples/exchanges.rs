//! A gateway for benchmarks: so many exchanges at once on one connection, each answered message by message, for so long.
//!
//!     exchanges PORT CONCURRENCY SECONDS FILE...
//!
//! A file holds the gRPC-framed messages of one exchange; exchanges take the files in turn. Prints one JSON object;
//! anything but a reply to each message and status OK ends it with an error.

use std::error::Error;
use std::fs;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes, BytesMut};
use h2::RecvStream;
use h2::client::SendRequest;
use http::{Method, Request};
use tokio::net::TcpStream;
use tokio::task::LocalSet;

type Failure = Box<dyn Error>;

const PREFIX_BYTES: usize = 5;
const PATH: &str = "http://picker/envoy.service.ext_proc.v3.ExternalProcessor/Process";

fn messages(file: &str) -> Result<Vec<Bytes>, Failure> {
    let mut rest = Bytes::from(fs::read(file)?);
    let mut found = Vec::new();
    while rest.len() >= PREFIX_BYTES {
        let size_bytes = (&rest[1..PREFIX_BYTES]).get_u32() as usize;
        found.push(rest.split_to(PREFIX_BYTES + size_bytes));
    }
    Ok(found)
}

/// Reads until one message is there.
async fn reply(incoming: &mut RecvStream, held: &mut BytesMut) -> Result<(), Failure> {
    loop {
        if held.len() >= PREFIX_BYTES {
            let size_bytes = PREFIX_BYTES + (&held[1..PREFIX_BYTES]).get_u32() as usize;
            if held.len() >= size_bytes {
                held.advance(size_bytes);
                return Ok(());
            }
        }
        let data = incoming.data().await.ok_or("the stream ended without a reply")??;
        incoming.flow_control().release_capacity(data.len())?;
        held.extend_from_slice(&data);
    }
}

async fn exchange(sender: SendRequest<Bytes>, messages: &[Bytes]) -> Result<(), Failure> {
    let request = Request::builder()
        .method(Method::POST)
        .uri(PATH)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let (response, mut outgoing) = sender.ready().await?.send_request(request, false)?;
    let mut response = Some(response);
    let mut incoming = None;
    let mut held = BytesMut::new();
    for message in messages {
        outgoing.send_data(message.clone(), false)?;
        if let Some(response) = response.take() {
            incoming = Some(response.await?.into_body());
        }
        reply(incoming.as_mut().ok_or("no response")?, &mut held).await?;
    }
    outgoing.send_data(Bytes::new(), true)?;
    let mut incoming = incoming.ok_or("no message in the file")?;
    if incoming.data().await.is_some() {
        return Err("more replies than messages".into());
    }
    let trailers = incoming.trailers().await?.ok_or("no status")?;
    if trailers.get("grpc-status").is_none_or(|status| status != "0") {
        return Err(format!("{trailers:?}").into());
    }
    Ok(())
}

async fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, concurrency, seconds, files @ ..] = arguments.as_slice() else { return Err("see the source".into()) };
    let socket = TcpStream::connect(("127.0.0.1", port.parse::<u16>()?)).await?;
    socket.set_nodelay(true)?;
    let (sender, connection) = h2::client::handshake(socket).await?;
    tokio::task::spawn_local(async move {
        // The exchanges say what went wrong.
        let _ = connection.await;
    });
    let scripts = Rc::new(files.iter().map(|file| messages(file)).collect::<Result<Vec<_>, _>>()?);
    let started = Instant::now();
    let until = started + Duration::from_secs_f64(seconds.parse()?);
    let workers: Vec<_> = (0..concurrency.parse::<usize>()?)
        .map(|number| {
            let (sender, scripts) = (sender.clone(), Rc::clone(&scripts));
            tokio::task::spawn_local(async move {
                let mut seconds = Vec::new();
                while Instant::now() < until {
                    let began = Instant::now();
                    let script = &scripts[(number + seconds.len() * 31) % scripts.len()];
                    exchange(sender.clone(), script).await.map_err(|error| error.to_string())?;
                    seconds.push(began.elapsed().as_secs_f64());
                }
                Ok::<_, String>(seconds)
            })
        })
        .collect();
    let mut all = Vec::new();
    for worker in workers {
        all.extend(worker.await??);
    }
    let elapsed_s = started.elapsed().as_secs_f64();
    all.sort_by(f64::total_cmp);
    let at = |share: f64| 1000.0 * all[((all.len() - 1) as f64 * share) as usize];
    println!(
        "{{\"exchanges\": {}, \"seconds\": {elapsed_s:.3}, \"p50_ms\": {:.3}, \"p99_ms\": {:.3}}}",
        all.len(),
        at(0.5),
        at(0.99)
    );
    Ok(())
}

fn main() -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    LocalSet::new().block_on(&runtime, run())
}
