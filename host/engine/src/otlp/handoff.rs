//! The spans of a handoff: from the end of thinking to the end of the answer, and in it the transfer.

use std::time::{Duration, SystemTime};

use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanKind, Status};
use opentelemetry_sdk::trace::SpanData;

use super::{Maker, TraceParent};

/// An answer that `meridian handoff` asked another engine for, when it is over.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HandoffSpan {
    /// The address of the engine that answers.
    pub engine: String,
    /// KV blocks of the request at the end of its thinking.
    pub blocks: u32,
    /// Tokens that this engine wrote.
    pub answer_tokens: u32,
    /// From the request for the answer to its first token, if there was one.
    pub begun_after: Option<Duration>,
    /// From the request for the answer to its end.
    pub took: Duration,
    /// Why the first engine had to go on, if it had to.
    pub failure: Option<&'static str>,
    /// The caller's span, if the request came with one.
    pub parent: Option<TraceParent>,
}

impl Maker {
    pub(super) fn handoff(&mut self, ended: &HandoffSpan, now: SystemTime, spans: &mut Vec<SpanData>) {
        let HandoffSpan { engine, blocks, answer_tokens, begun_after, took, failure, parent } = ended;
        let Some((caller, context)) = self.sampled(parent.as_ref()) else { return };
        let start = now.checked_sub(*took).unwrap_or(now);
        let attributes = vec![
            KeyValue::new("server.address", engine.clone()),
            KeyValue::new("meridian.handoff.blocks", i64::from(*blocks)),
            KeyValue::new("meridian.tokens.answer", i64::from(*answer_tokens)),
        ];
        let mut whole = self.span(&context, caller.as_ref(), "handoff", SpanKind::Client, start, now, attributes);
        whole.parent_span_is_remote = caller.is_some();
        if let Some(failure) = failure {
            whole.status = Status::error(*failure);
        }
        spans.push(whole);
        if let Some(after) = begun_after {
            let own = self.context(Some(&context));
            let end = start.checked_add(*after).unwrap_or(now);
            spans.push(self.span(&own, Some(&context), "transfer", SpanKind::Internal, start, end, Vec::new()));
        }
    }
}
