//! Frames on a TCP connection.

use std::io;
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::fabric::wire::{self, HEADER_BYTES, WireError};

const BUFFER_BYTES: usize = 8 << 10;

/// Why a connection ended.
#[derive(Debug)]
pub(crate) enum Broken {
    /// By the peer or the network.
    Ended,
    /// The peer broke the protocol.
    Wire(WireError),
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Ended
    }
}

impl From<WireError> for Broken {
    fn from(error: WireError) -> Self {
        Self::Wire(error)
    }
}

/// The receiving side. Small reads come from a buffer; large ones go straight to their place.
pub(crate) struct Inbox {
    stream: Arc<TcpStream>,
    buffer: Box<[u8; BUFFER_BYTES]>,
    start: usize,
    end: usize,
}

impl Inbox {
    pub(crate) fn new(stream: Arc<TcpStream>) -> Self {
        Self { stream, buffer: Box::new([0; BUFFER_BYTES]), start: 0, end: 0 }
    }

    /// Fill the head of `to`; returns how much, at least 1.
    pub(crate) async fn some(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end {
            if to.len() >= BUFFER_BYTES {
                return receive(&self.stream, to).await;
            }
            (self.start, self.end) = (0, receive(&self.stream, &mut self.buffer[..]).await?);
        }
        let count = to.len().min(self.end - self.start);
        to[..count].copy_from_slice(&self.buffer[self.start..self.start + count]);
        self.start += count;
        Ok(count)
    }

    pub(crate) async fn exact(&mut self, mut to: &mut [u8]) -> io::Result<()> {
        while !to.is_empty() {
            let count = self.some(to).await?;
            to = &mut to[count..];
        }
        Ok(())
    }

    /// The kind of the next frame, and the bytes of its body.
    pub(crate) async fn header(&mut self, most_bytes: usize) -> Result<(u8, usize), Broken> {
        let mut header = [0; HEADER_BYTES];
        self.exact(&mut header).await?;
        Ok(wire::header(&header, most_bytes)?)
    }

    /// A body, which the caller has found short enough.
    pub(crate) async fn body(&mut self, bytes: usize) -> io::Result<Vec<u8>> {
        // As it arrives: a peer that names a length has not sent so much.
        let mut body = Vec::new();
        while body.len() < bytes {
            let (from, more) = (body.len(), (bytes - body.len()).min(64 << 10));
            body.resize(from + more, 0);
            self.exact(&mut body[from..]).await?;
        }
        Ok(body)
    }

    pub(crate) async fn discard(&mut self, mut bytes: usize) -> io::Result<()> {
        let mut scratch = vec![0; bytes.min(64 << 10)];
        while bytes > 0 {
            let most = bytes.min(scratch.len());
            bytes -= self.some(&mut scratch[..most]).await?;
        }
        Ok(())
    }
}

async fn receive(stream: &TcpStream, to: &mut [u8]) -> io::Result<usize> {
    loop {
        stream.readable().await?;
        match stream.try_read(to) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

pub(crate) async fn send(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
