//! What the host logs, kept until Python asks for it: logging from another thread would need the interpreter's lock, which
//! the scheduling thread may hold while it waits for the slot.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use meridian_core::text::printable;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::{Layer, registry};

/// Lines kept; older ones are dropped.
const KEPT: usize = 1024;
/// Longest line, characters.
const MAX_CHARS: usize = 2000;

static LINES: Mutex<VecDeque<(u8, String)>> = Mutex::new(VecDeque::new());
static WAITING: AtomicUsize = AtomicUsize::new(0);
static LOGGED: Condvar = Condvar::new();

struct Keep;

impl<S: Subscriber> Layer<S> for Keep {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let level = match *metadata.level() {
            Level::ERROR => 40,
            Level::WARN => 30,
            Level::INFO => 20,
            Level::DEBUG | Level::TRACE => return,
        };
        if !metadata.target().starts_with("meridian") {
            return;
        }
        let mut line = Line::default();
        event.record(&mut line);
        // Paths and the words of a component are others' to choose: no line of theirs may look like one of ours.
        let text = format!("{}{}", line.message, line.fields);
        let text: String = printable(&text).chars().take(MAX_CHARS).collect();
        let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == KEPT {
            lines.pop_front();
        }
        lines.push_back((level, text));
        WAITING.store(lines.len(), Ordering::Release);
        LOGGED.notify_all();
    }
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        // Writing to a string does not fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

/// Begin to keep what is logged; once a process.
pub(crate) fn keep() {
    // Another subscriber is there only when this was called before.
    let _ = tracing::subscriber::set_global_default(registry().with(Keep));
}

/// Lines that wait, with Python's numbers of their levels, oldest first.
pub(crate) fn take() -> Vec<(u8, String)> {
    if WAITING.load(Ordering::Acquire) == 0 {
        return Vec::new();
    }
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    WAITING.store(0, Ordering::Release);
    lines.drain(..).collect()
}

/// Wait until there is a line, `patience` at most; whether there is one.
pub(crate) fn wait(patience: Duration) -> bool {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = LOGGED.wait_timeout_while(lines, patience, |lines| lines.is_empty());
    !waited.unwrap_or_else(PoisonError::into_inner).0.is_empty()
}
