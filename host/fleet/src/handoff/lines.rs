//! Cuts a stream into its server-sent events.

use bytes::{Bytes, BytesMut};

/// Largest event, bytes: the ids of a prompt of a million tokens fit.
pub(super) const MAX_EVENT: usize = 16 << 20;

/// The bytes that have come, less the events that were taken. Each byte is looked at once, however small the pieces are.
#[derive(Default)]
pub(super) struct Lines {
    buffer: BytesMut,
    /// Bytes of the buffer in which no line ends.
    without_end: usize,
}

impl Lines {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The data of the next event; `None` until more bytes have come.
    ///
    /// # Errors
    /// The event is longer than [`MAX_EVENT`].
    pub(super) fn next(&mut self) -> Result<Option<Bytes>, &'static str> {
        while let Some(at) = self.buffer[self.without_end..].iter().position(|byte| *byte == b'\n') {
            let line = self.buffer.split_to(self.without_end + at + 1).freeze();
            self.without_end = 0;
            // vLLM writes each event as one line of data.
            if let Some(data) = line.strip_prefix(b"data:") {
                return Ok(Some(line.slice_ref(data.trim_ascii())));
            }
        }
        self.without_end = self.buffer.len();
        if self.without_end > MAX_EVENT { Err("broken") } else { Ok(None) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(stream: &[u8], piece: usize) -> Vec<Bytes> {
        let (mut lines, mut events) = (Lines::default(), Vec::new());
        for piece in stream.chunks(piece) {
            lines.push(piece);
            while let Some(event) = lines.next().expect("short") {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_the_same_in_pieces_of_any_size() {
        let stream = b": a comment\r\ndata: one\r\n\r\nevent: x\ndata:\ndata:  two  \n\nid: 7\n\ndata: cut off";
        for piece in 1..=stream.len() {
            assert_eq!(events(stream, piece), ["one", "", "two"], "{piece}");
        }
    }

    #[test]
    fn a_long_event_is_looked_through_once_and_has_an_end() {
        let mut lines = Lines::default();
        let mut looked_at = 0;
        for _ in 0..MAX_EVENT >> 10 {
            lines.push(&[b'x'; 1 << 10]);
            looked_at += lines.buffer.len() - lines.without_end;
            assert_eq!(lines.next(), Ok(None));
        }
        assert_eq!(looked_at, MAX_EVENT);
        lines.push(b"x");
        assert_eq!(lines.next(), Err("broken"));
    }
}
