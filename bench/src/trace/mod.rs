//! Requests to replay: readers of recorded traces, and a generator.

use std::sync::Arc;

mod agentic;
mod aiperf;
mod azure;
mod bailian;
mod burstgpt;
mod check;
mod columns;
mod conversations;
mod copilot;
mod error;
mod format;
mod generate;
mod lengths;
mod meridian;
mod mooncake;
mod presets;
mod read;
mod recognise;
mod rows;
mod sample;
mod servegen;
mod sessions;
mod sharegpt;
mod source;
mod streams;
mod summary;
mod time;
mod vllm_bench;
mod workload;
mod write;

pub(crate) use self::rows::MAX_TOKENS;

pub use columns::ColumnNames;
pub use error::{TraceError, WorkloadError};
pub use format::Format;
pub use generate::Generator;
pub use read::{ReadOptions, ThinkSplit, Trace, read, read_from};
pub use sessions::{Session, SessionRequest};
pub use sharegpt::TokenCount;
pub use summary::{Lengths, Summary};
pub use time::Unit;
pub use workload::{Arrivals, Class, Mode, Prompt, Regime, Sessions, Tenants, Wave, Workload};
pub use write::{Tool, write_csv, write_for, write_sessions};

/// One request of a trace.
///
/// ```
/// use meridian_bench::trace::{Prefix, TraceRequest};
///
/// let request = TraceRequest { prompt_tokens: 120, think_tokens: 900, output_tokens: 200, ..TraceRequest::default() };
/// assert_eq!((request.deadline_ms, request.prefix), (f64::INFINITY, Prefix::None));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct TraceRequest {
    /// Seconds since the start of the trace, never before the request that precedes it.
    pub arrival_s: f64,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens of thinking, the end marker not included; 0 for a request that answers at once.
    pub think_tokens: u32,
    /// Tokens of the answer, at least 1.
    pub output_tokens: u32,
    /// Name of the tenant; empty for none.
    pub tenant: Arc<str>,
    /// The client's priority, lower is more urgent.
    pub priority: i32,
    /// Deadline, milliseconds after arrival; infinite for none.
    pub deadline_ms: f64,
    /// What its prompt has in common with others.
    pub prefix: Prefix,
}

impl Default for TraceRequest {
    fn default() -> Self {
        Self {
            arrival_s: 0.0,
            prompt_tokens: 1,
            think_tokens: 0,
            output_tokens: 1,
            tenant: Arc::from(""),
            priority: 0,
            deadline_ms: f64::INFINITY,
            prefix: Prefix::None,
        }
    }
}

impl TraceRequest {
    /// Cut to `most` tokens in all, at least 2: of the prompt first, down to a quarter, then of both other phases alike.
    ///
    /// ```
    /// use meridian_bench::trace::TraceRequest;
    ///
    /// let long = TraceRequest { prompt_tokens: 900, think_tokens: 300, output_tokens: 100, ..TraceRequest::default() };
    /// let cut = long.clipped(1000);
    /// assert_eq!((cut.prompt_tokens, cut.think_tokens, cut.output_tokens), (600, 300, 100));
    /// ```
    #[must_use]
    pub fn clipped(&self, most: u32) -> Self {
        let mut request = self.clone();
        lengths::clip(&mut request, most.max(2));
        request
    }
}

/// What a prompt has in common with the prompts of other requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    /// Nothing.
    #[default]
    None,
    /// Its blocks by content: equal ids are equal tokens, when all blocks before are equal too.
    Blocks {
        /// Tokens of a block; the last one may be shorter.
        tokens: u32,
        /// One id a block, first to last.
        ids: Arc<[u64]>,
    },
    /// A request of a recorded session: its full blocks by content, as ranges of ids that include both ends and that are
    /// the session's own.
    Ranges {
        /// Which session.
        session: u64,
        /// Tokens of a block.
        tokens: u32,
        /// Ids, first to last.
        ranges: Arc<[[u32; 2]]>,
    },
    /// A turn of a conversation: its prompt is the prompt and the answer of the turn before, then new text. It does not
    /// arrive before that turn is over.
    Session {
        /// Which conversation.
        id: u64,
        /// Which turn, from 0.
        turn: u32,
    },
}
