//! What all readers do with the lengths of a row: split, clip, sort.

use rand_pcg::Pcg64;

use super::rows::MAX_SECONDS;
use super::sample::Shares;
use super::streams::{Stream, Streams};
use super::{Prefix, ReadOptions, ThinkSplit, TraceError, TraceRequest, Workload};

/// A service of more requests a second, or of longer gaps, is read in a wrong unit rather than recorded so.
const MOST_RATE: f64 = 2000.0;
const MOST_GAP_S: f64 = 3600.0;

pub(super) struct Builder {
    split: Option<(Streams, Shares)>,
    clip_tokens: Option<u32>,
    rows: u64,
    skipped: usize,
    clipped: usize,
    requests: Vec<TraceRequest>,
    notes: Vec<String>,
}

impl Builder {
    pub(super) fn new(options: &ReadOptions) -> Self {
        let split = match options.think {
            ThinkSplit::None => None,
            ThinkSplit::Bimodal { seed } => Some((Streams::new(seed), Shares::new(&Workload::reasoning_chat().modes))),
        };
        Self {
            split,
            clip_tokens: options.clip_tokens,
            rows: 0,
            skipped: 0,
            clipped: 0,
            requests: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Rows so far, those of failed requests included.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Adds a row without phases, all generated tokens in `output_tokens`. A row without prompt or generated tokens is
    /// counted, not kept: it is a request that failed.
    pub(super) fn push_generated(&mut self, mut request: TraceRequest) {
        if request.prompt_tokens == 0 || request.output_tokens == 0 {
            return self.skip();
        }
        if let Some((streams, shares)) = &self.split {
            let mut rng: Pcg64 = streams.rng(Stream::Split, self.rows, 0);
            let generated = request.output_tokens;
            let think = (f64::from(generated) * shares.draw(&mut rng)).round() as u32;
            request.think_tokens = think.min(generated - 1);
            request.output_tokens = generated - request.think_tokens;
        }
        self.push(request);
    }

    /// Counts a row of a request that failed.
    pub(super) fn skip(&mut self) {
        self.rows += 1;
        self.skipped += 1;
    }

    /// Adds a row that has its phases.
    pub(super) fn push(&mut self, mut request: TraceRequest) {
        self.rows += 1;
        if self.clip_tokens.is_some_and(|most| clip(&mut request, most)) {
            self.clipped += 1;
        }
        self.requests.push(request);
    }

    pub(super) fn finish(mut self, name: &str) -> Result<(Vec<TraceRequest>, Vec<String>), TraceError> {
        self.requests.sort_by(|a, b| a.arrival_s.total_cmp(&b.arrival_s));
        let Some(start_s) = self.requests.first().map(|request| request.arrival_s) else {
            return Err(TraceError::Empty { name: name.to_owned(), skipped: self.skipped });
        };
        for request in &mut self.requests {
            request.arrival_s -= start_s;
        }
        let (count, span_s) = (self.requests.len(), self.requests.last().map_or(0.0, |last| last.arrival_s));
        if span_s > MAX_SECONDS {
            return Err(TraceError::TooLong { name: name.to_owned(), span_s, most_s: MAX_SECONDS });
        }
        let rate = (count - 1) as f64 / span_s;
        if count >= 20 && span_s > 0.0 && !(1.0 / MOST_GAP_S..=MOST_RATE).contains(&rate) {
            self.notes.push(format!("{rate:.3e} requests/s: --unit s, ms, us or ns sets another unit of the arrivals"));
        }
        if self.skipped > 0 {
            self.notes
                .push(format!("{} of {} rows left out: no prompt or no generated tokens", self.skipped, self.rows));
        }
        if let (Some(most), 1..) = (self.clip_tokens, self.clipped) {
            self.notes.push(format!("{} of {} requests clipped to {most} tokens", self.clipped, self.requests.len()));
        }
        Ok((self.requests, self.notes))
    }
}

/// Cuts a request to `most` tokens in all, but never below one token of prompt and one of answer; whether it had to.
pub(super) fn clip(request: &mut TraceRequest, most: u32) -> bool {
    // In 64 bits: three lengths of ten million fit in 32, a caller's `most` need not.
    let (prompt, think, output) =
        (u64::from(request.prompt_tokens), u64::from(request.think_tokens), u64::from(request.output_tokens));
    let over = (prompt + think + output).saturating_sub(u64::from(most));
    if over == 0 {
        return false;
    }
    let prompt = (prompt - over.min(prompt.saturating_sub(u64::from(most / 4)))).max(1);
    let room = u64::from(most).saturating_sub(prompt).max(1);
    let generated = think + output;
    let output = if generated > room { (output * room / generated).max(1) } else { output };
    request.prompt_tokens = prompt as u32;
    request.think_tokens = think.min(room - output) as u32;
    request.output_tokens = output as u32;
    if let Prefix::Blocks { tokens, ids } = &mut request.prefix {
        let blocks = request.prompt_tokens.div_ceil(*tokens) as usize;
        if blocks < ids.len() {
            *ids = ids[..blocks].into();
        }
    }
    true
}
