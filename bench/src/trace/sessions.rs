//! Sessions of agents: requests that follow each other in closed loop.

use std::sync::Arc;

use super::rows::MAX_TOKENS;
use super::sample::Shares;
use super::streams::{Stream, Streams};
use super::{Prefix, ThinkSplit, TraceRequest, Workload};

/// A recorded session. Its next request arrives `gap_s` after the last one ended, whenever that is.
///
/// ```
/// use meridian_bench::trace::{Session, SessionRequest};
///
/// let request = |gap_s, prompt_tokens, blocks: &[[u32; 2]]| SessionRequest {
///     gap_s,
///     prompt_tokens,
///     output_tokens: 10,
///     blocks: blocks.into(),
///     ..SessionRequest::default()
/// };
/// let session = Session::new("a".into(), 64, vec![request(0.0, 130, &[[1, 2]]), request(9.0, 250, &[[1, 1], [3, 4]])]);
/// assert_eq!(session.requests[1].known_blocks, 1);
/// assert_eq!(session.requests[0].next_blocks, 1);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// Its name in the trace.
    pub id: Arc<str>,
    /// Tokens of a block of [`SessionRequest::blocks`].
    pub block_tokens: u32,
    /// In order.
    pub requests: Vec<SessionRequest>,
}

/// One request of a session.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionRequest {
    /// Seconds between the end of the request before and this one's arrival: the client's own time. 0 for the first.
    pub gap_s: f64,
    /// Tokens of the prompt, at least 1.
    pub prompt_tokens: u32,
    /// Tokens of thinking.
    pub think_tokens: u32,
    /// Tokens of the answer, at least 1.
    pub output_tokens: u32,
    /// It ended with a call of a tool, so that the client comes back without its user.
    pub stopped_for_tool: bool,
    /// The full blocks of its prompt by content, first to last, as ranges that include both ends. Equal ids of one session are
    /// equal tokens behind an equal prefix.
    pub blocks: Arc<[[u32; 2]]>,
    /// Blocks from the first on that earlier requests of the session had as well: what an unlimited cache finds.
    pub known_blocks: u32,
    /// Blocks from the first on that the session's next request has as well; 0 for the last.
    pub next_blocks: u32,
}

/// Largest block id: ids are counted up within a session.
pub(super) const MAX_BLOCK: u32 = MAX_TOKENS;

/// Length of the common start of two lists of blocks.
fn common(a: &[[u32; 2]], b: &[[u32; 2]]) -> u32 {
    let mut same = 0;
    for (a, b) in a.iter().zip(b) {
        if a[0] != b[0] {
            break;
        }
        let (of_a, of_b) = (a[1] - a[0] + 1, b[1] - b[0] + 1);
        same += of_a.min(of_b);
        if of_a != of_b {
            break;
        }
    }
    same
}

/// Adjacent ranges become one, so that equal lists are equal ranges.
pub(super) fn merged(ranges: impl IntoIterator<Item = [u32; 2]>) -> Arc<[[u32; 2]]> {
    let mut out: Vec<[u32; 2]> = Vec::new();
    for [first, last] in ranges {
        match out.last_mut() {
            Some(before) if before[1].checked_add(1) == Some(first) => before[1] = last,
            _ => out.push([first, last]),
        }
    }
    out.into()
}

impl Session {
    /// A session of these requests; what they have in common is found here.
    #[must_use]
    pub fn new(id: Arc<str>, block_tokens: u32, mut requests: Vec<SessionRequest>) -> Self {
        let last = requests.iter().flat_map(|request| request.blocks.iter().map(|range| range[1])).max().unwrap_or(0);
        let mut seen = vec![false; last as usize + 1];
        for request in &mut requests {
            let ids = || request.blocks.iter().flat_map(|[first, last]| *first..=*last);
            request.known_blocks = ids().take_while(|id| seen[*id as usize]).count() as u32;
            ids().skip(request.known_blocks as usize).for_each(|id| seen[id as usize] = true);
        }
        for at in 0..requests.len() {
            let next = requests.get(at + 1).map(|next| common(&requests[at].blocks, &next.blocks));
            requests[at].next_blocks = next.unwrap_or(0);
        }
        Self { id, block_tokens, requests }
    }

    /// The request at this place as the session `number` sends it.
    pub(crate) fn request(&self, number: u64, turn: usize) -> TraceRequest {
        let SessionRequest { prompt_tokens, think_tokens, output_tokens, blocks, .. } = &self.requests[turn];
        TraceRequest {
            prompt_tokens: *prompt_tokens,
            think_tokens: *think_tokens,
            output_tokens: *output_tokens,
            prefix: Prefix::Ranges { session: number, tokens: self.block_tokens, ranges: Arc::clone(blocks) },
            ..TraceRequest::default()
        }
    }

    /// With a `divisor`th of all tokens, for an engine that is as much smaller. Blocks keep their ids, so that what
    /// requests have in common stays the same share of their prompts. `None` where blocks cannot be divided by it.
    #[must_use]
    pub fn shrunk(&self, divisor: u32) -> Option<Self> {
        if divisor == 0 || !self.block_tokens.is_multiple_of(divisor) {
            return None;
        }
        let mut session = self.clone();
        session.block_tokens /= divisor;
        for request in &mut session.requests {
            request.prompt_tokens = (request.prompt_tokens / divisor).max(1);
            request.think_tokens /= divisor;
            request.output_tokens = (request.output_tokens / divisor).max(1);
        }
        Some(session)
    }

    /// With gaps so many times as long, those that a user takes `user_times` that.
    #[must_use]
    pub fn with_gaps(mut self, times: f64, user_times: f64) -> Self {
        let mut after_tool = false;
        for request in &mut self.requests {
            request.gap_s *= if after_tool { times } else { times * user_times };
            after_tool = request.stopped_for_tool;
        }
        self
    }

    /// Cut each prompt so that the request has `most` tokens in all, at least a quarter of them prompt.
    pub(super) fn clip(&mut self, most: u32) -> usize {
        let mut clipped = 0;
        let block_tokens = self.block_tokens;
        for request in &mut self.requests {
            let mut as_request = TraceRequest {
                prompt_tokens: request.prompt_tokens,
                think_tokens: request.think_tokens,
                output_tokens: request.output_tokens,
                ..TraceRequest::default()
            };
            if !super::lengths::clip(&mut as_request, most) {
                continue;
            }
            clipped += 1;
            request.prompt_tokens = as_request.prompt_tokens;
            request.think_tokens = as_request.think_tokens;
            request.output_tokens = as_request.output_tokens;
            let mut left = request.prompt_tokens / block_tokens;
            let kept = request.blocks.iter().map_while(|[first, last]| {
                let count = left.min(last - first + 1);
                left -= count;
                (count > 0).then(|| [*first, first + count - 1])
            });
            request.blocks = kept.collect();
        }
        if clipped > 0 {
            *self = Self::new(Arc::clone(&self.id), block_tokens, std::mem::take(&mut self.requests));
        }
        clipped
    }
}

/// Draws thinking for the requests that are known to have some: traces say which ones, not how much.
pub(super) struct ThinkingDrawn {
    drawn: Option<(Streams, Shares)>,
    requests: u64,
}

impl ThinkingDrawn {
    pub(super) fn new(think: ThinkSplit) -> Self {
        let drawn = match think {
            ThinkSplit::None => None,
            ThinkSplit::Bimodal { seed } => Some((Streams::new(seed), Shares::new(&Workload::reasoning_chat().modes))),
        };
        Self { drawn, requests: 0 }
    }

    /// (think, output) of so many generated tokens.
    pub(super) fn split(&mut self, generated: u32, thinks: bool) -> (u32, u32) {
        self.requests += 1;
        let Some((streams, shares)) = self.drawn.as_ref().filter(|_| thinks) else { return (0, generated) };
        let share = shares.draw(&mut streams.rng(Stream::Split, self.requests, 0));
        let think = ((f64::from(generated) * share).round() as u32).min(generated - 1);
        (think, generated - think)
    }
}
