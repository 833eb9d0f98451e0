use super::is_measured;

/// Reasoning path deviation index: the entropy of the latest tokens relative to the whole thinking so far.
///
/// `RPDI_t = LTF / GTF`, with `LTF` the mean entropy (nats) of the last `W` tokens and `GTF` that of all `t` tokens, from
/// `t = W` on. Thinking may end at a boundary token (sentence end, newline, comma) whose index is above
/// `rpdi_threshold`.
///
/// After RPDI-EE, arXiv 2603.14251 (W = 512, threshold 2). Only the abstract of that paper was available: the
/// definition is that of an independent implementation and may differ from the authors'.
///
/// A token without a measured entropy does not count in `t`. The window takes `4 W` bytes, from the first entropy on.
/// The sums are compensated (Neumaier 1974), so that they do not drift however long the thinking is.
///
/// ```
/// use meridian_core::budget::Rpdi;
///
/// let mut rpdi = Rpdi::new(2);
/// rpdi.push(1.0);
/// assert_eq!(rpdi.value(), None);
/// rpdi.push(1.0);
/// rpdi.push(4.0);
/// assert_eq!(rpdi.value(), Some(2.5 / 2.0));
/// ```
#[derive(Clone, Debug)]
pub struct Rpdi {
    window: usize,
    /// The last entropies in a ring; `next` is the oldest once it is full.
    ring: Vec<f32>,
    next: usize,
    local: Sum,
    global: Sum,
    tokens: u64,
}

impl Rpdi {
    /// No tokens; a window of `window` tokens, at least 1.
    #[must_use]
    pub fn new(window: u32) -> Self {
        let window = window.max(1) as usize;
        Self { window, ring: Vec::new(), next: 0, local: Sum::default(), global: Sum::default(), tokens: 0 }
    }

    /// Take in the entropy of one token, nats. Returns whether it counts: a negative or non-finite entropy counts as
    /// not measured.
    pub fn push(&mut self, nats: f32) -> bool {
        if !is_measured(f64::from(nats)) {
            return false;
        }
        if self.ring.len() < self.window {
            if self.ring.is_empty() {
                self.ring.reserve_exact(self.window);
            }
            self.ring.push(nats);
        } else {
            let oldest = std::mem::replace(&mut self.ring[self.next], nats);
            self.next = (self.next + 1) % self.window;
            self.local.add(-f64::from(oldest));
        }
        self.local.add(f64::from(nats));
        self.global.add(f64::from(nats));
        self.tokens += 1;
        true
    }

    /// The index after the latest token; `None` before the window is full, or while every entropy was 0.
    #[must_use]
    pub fn value(&self) -> Option<f64> {
        let all = self.global.value() / self.tokens as f64;
        (self.ring.len() == self.window && all > 0.0).then(|| self.local.value() / self.window as f64 / all)
    }

    /// Use another window, at least 1. A longer one has no value until it is full.
    pub fn set_window(&mut self, window: u32) {
        let window = window.max(1) as usize;
        if window == self.window {
            return;
        }
        self.ring.rotate_left(self.next);
        self.next = 0;
        let surplus = self.ring.len().saturating_sub(window);
        self.ring.drain(..surplus);
        self.window = window;
        self.local = Sum::default();
        self.ring.iter().for_each(|nats| self.local.add(f64::from(*nats)));
    }
}

/// A sum that keeps the rounding errors.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    sum: f64,
    lost: f64,
}

impl Sum {
    fn add(&mut self, term: f64) {
        let sum = self.sum + term;
        let (large, small) = if self.sum.abs() >= term.abs() { (self.sum, term) } else { (term, self.sum) };
        self.lost += (large - sum) + small;
        self.sum = sum;
    }

    fn value(self) -> f64 {
        self.sum + self.lost
    }
}
