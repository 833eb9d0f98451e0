//! How many tokens a request will still generate, from what the requests of its tenant have generated.
//!
//! Lengths are spread over orders of magnitude, so they are counted in buckets, two to an octave: how many requests have
//! passed through a bucket, and how many have ended in it. The share of these is the hazard, and the product of the others
//! the share of requests that live on (Kaplan and Meier, 1958). It does not wait for long requests to end before it knows
//! that there are some, and it knows that what has thought for long will go on for longer than the mean.

/// The first count of tokens of each bucket: none, then two to an octave.
const STARTS: [u32; BUCKETS + 1] = [
    0, 1, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048, 2896, 4096, 5793, 8192, 11_585,
    16_384, 23_170, 32_768, 46_341, 65_536, 92_682, 131_072, 185_364, 262_144, 370_728, 524_288,
];
const BUCKETS: usize = 32;
/// With so many requests counted in a bucket, its counts are halved, so that a tenant may change.
const COUNTED: f32 = 256.0;
/// Before any request, one is taken to have ended in each bucket with this probability.
const FIRST_HAZARD: f32 = 0.25;
/// A tenant counts as if so many requests of all tenants had been its own.
const REQUESTS_OF_ALL: f32 = 4.0;
/// Tenants with counts of their own; the requests of further ones are forecast as those of all.
const TENANTS: usize = 1024;
/// Share of requests that live on at the high forecast.
const RARE: f32 = 0.1;

/// Where a request stands in what it generates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Course {
    bucket: u8,
    /// Tokens from which on it is in the next bucket.
    ends_at: u32,
    answers: bool,
}

impl Course {
    /// Of a request that has generated nothing.
    pub(crate) const NEW: Self = Self { bucket: 0, ends_at: STARTS[1], answers: false };

    /// Whether its latest token, of its answer or not, changes where it stands.
    #[inline]
    pub(crate) fn changes(&self, answers: bool, tokens: u32) -> bool {
        answers != self.answers && answers || answers == self.answers && tokens >= self.ends_at
    }
}

/// Tokens that a request will still generate.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Left {
    /// Of thinking: the mean, and what one in ten exceeds.
    pub(crate) think: f32,
    pub(crate) think_high: f32,
    /// Of the answer, the mean.
    pub(crate) output: f32,
}

/// Lengths of thinking and of answers.
#[derive(Debug, Default)]
pub(crate) struct Forecast {
    all: Lengths,
    /// By the tenant's number, as far as one was seen.
    tenants: Vec<Lengths>,
    /// Those whose counts have changed.
    stale: Vec<u32>,
}

#[derive(Debug, Default)]
struct Lengths {
    think: Spread,
    output: Spread,
    is_stale: bool,
}

impl Forecast {
    /// A request of the tenant has generated its `tokens`th token, of its answer or of its thinking.
    pub(crate) fn passed(&mut self, tenant: u32, course: &mut Course, answers: bool, tokens: u32) {
        if answers && !course.answers {
            self.count(tenant, *course, true);
            *course = Course { answers, ..Course::NEW };
        }
        // Thinking that begins again belongs to the answer.
        while answers == course.answers && tokens >= course.ends_at {
            self.count(tenant, *course, false);
            course.bucket += 1;
            let next = STARTS.get(usize::from(course.bucket) + 1).filter(|_| usize::from(course.bucket) < BUCKETS - 1);
            course.ends_at = next.copied().unwrap_or(u32::MAX);
        }
    }

    /// A request of the tenant has ended.
    pub(crate) fn ended(&mut self, tenant: u32, course: Course) {
        // One that ends while it thinks was cut: where it would have ended is not known.
        if course.answers {
            self.count(tenant, course, true);
        }
    }

    fn count(&mut self, tenant: u32, course: Course, has_ended: bool) {
        let Self { all, tenants, stale } = self;
        let own = tenant as usize;
        if (1..=TENANTS).contains(&own) {
            if own > tenants.len() {
                tenants.resize_with(own, Lengths::default);
            }
            if !std::mem::replace(&mut tenants[own - 1].is_stale, true) {
                stale.push(tenant);
            }
        }
        all.is_stale = true;
        let own = own.checked_sub(1).and_then(|at| tenants.get_mut(at));
        for lengths in std::iter::once(all).chain(own) {
            let spread = if course.answers { &mut lengths.output } else { &mut lengths.think };
            spread.count(usize::from(course.bucket), has_ended);
        }
    }

    /// Take what was counted into the forecasts: before each step.
    pub(crate) fn refresh(&mut self) {
        let Self { all, tenants, stale } = self;
        if all.is_stale || !all.is_known() {
            all.think.forecast(1.0, &Spread::FIRST);
            all.output.forecast(1.0, &Spread::FIRST);
            all.is_stale = false;
        }
        for tenant in stale.drain(..) {
            let own = &mut tenants[tenant as usize - 1];
            own.think.forecast(REQUESTS_OF_ALL, &all.think);
            own.output.forecast(REQUESTS_OF_ALL, &all.output);
            own.is_stale = false;
        }
    }

    /// What a request of the tenant will still generate that stands there, with these tokens of thinking and of its answer.
    #[inline]
    pub(crate) fn left(&self, tenant: u32, course: Course, think_tokens: u32, output_tokens: u32) -> Left {
        let own = (tenant as usize).checked_sub(1).and_then(|at| self.tenants.get(at));
        let lengths = own.filter(|own| own.is_known()).unwrap_or(&self.all);
        let bucket = usize::from(course.bucket);
        if course.answers {
            return Left {
                output: lengths.output.left(bucket, output_tokens, &lengths.output.mean),
                ..Left::default()
            };
        }
        Left {
            think: lengths.think.left(bucket, think_tokens, &lengths.think.mean),
            think_high: lengths.think.left(bucket, think_tokens, &lengths.think.high),
            output: lengths.output.mean[0],
        }
    }
}

impl Lengths {
    /// Whether anything was forecast.
    fn is_known(&self) -> bool {
        self.think.mean[0] > 0.0
    }
}

/// The lengths of one kind.
#[derive(Debug)]
struct Spread {
    passed: [f32; BUCKETS],
    ended: [f32; BUCKETS],
    /// The hazard of each bucket.
    hazards: [f32; BUCKETS],
    /// Tokens still to come at the start of each bucket, and after the last: the mean, and what one in ten exceeds.
    mean: [f32; BUCKETS + 1],
    high: [f32; BUCKETS + 1],
}

impl Default for Spread {
    fn default() -> Self {
        Self::FIRST
    }
}

impl Spread {
    const FIRST: Self = Self {
        passed: [0.0; BUCKETS],
        ended: [0.0; BUCKETS],
        hazards: [FIRST_HAZARD; BUCKETS],
        mean: [0.0; BUCKETS + 1],
        high: [0.0; BUCKETS + 1],
    };

    fn count(&mut self, bucket: usize, has_ended: bool) {
        self.passed[bucket] += 1.0;
        self.ended[bucket] += f32::from(u8::from(has_ended));
        if self.passed[bucket] > COUNTED {
            self.passed[bucket] *= 0.5;
            self.ended[bucket] *= 0.5;
        }
    }

    /// Forecast from what was counted, and as if `requests` of another spread had been counted too.
    fn forecast(&mut self, requests: f32, of: &Self) {
        for bucket in (0..BUCKETS).rev() {
            self.hazards[bucket] =
                (self.ended[bucket] + requests * of.hazards[bucket]) / (self.passed[bucket] + requests);
            // Who ends in a bucket has half of it behind.
            let width = width(bucket);
            let beyond = self.mean[bucket + 1];
            self.mean[bucket] = width * 0.5 + (1.0 - self.hazards[bucket]) * (width * 0.5 + beyond);
        }
        for from in 0..BUCKETS {
            let (mut alive, mut tokens) = (1.0f32, 0.0);
            for bucket in from..BUCKETS {
                let after = alive * (1.0 - self.hazards[bucket]);
                if after <= RARE {
                    tokens += width(bucket) * (alive - RARE) / (alive - after);
                    break;
                }
                tokens += width(bucket);
                alive = after;
            }
            self.high[from] = tokens;
        }
    }

    /// Tokens still to come after `tokens`, which are in the bucket: between those at its start and those at its end.
    #[inline]
    fn left(&self, bucket: usize, tokens: u32, from_start: &[f32; BUCKETS + 1]) -> f32 {
        let share = ((tokens - STARTS[bucket].min(tokens)) as f32 / width(bucket)).min(1.0);
        from_start[bucket] + share * (from_start[bucket + 1] - from_start[bucket])
    }
}

fn width(bucket: usize) -> f32 {
    (STARTS[bucket + 1] - STARTS[bucket]) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of a tenant with these lengths, one after the other.
    fn after(tenant: u32, lengths: impl IntoIterator<Item = (u32, u32)>, forecast: &mut Forecast) {
        for (think, output) in lengths {
            let mut course = Course::NEW;
            for (answers, count) in [(false, think), (true, output)] {
                for tokens in 1..=count {
                    if course.changes(answers, tokens) {
                        forecast.passed(tenant, &mut course, answers, tokens);
                    }
                }
            }
            forecast.ended(tenant, course);
        }
        forecast.refresh();
    }

    fn near(found: f32, expected: f32, within: f32) {
        assert!((found / expected - 1.0).abs() < within, "{found}, expected {expected}");
    }

    #[test]
    fn a_mean_is_near_that_of_the_lengths() {
        let mut forecast = Forecast::default();
        after(1, (0..400).map(|i| (200 + i % 7 * 300, 40 + i % 3 * 200)), &mut forecast);
        let left = forecast.left(1, Course::NEW, 0, 0);
        near(left.think, 1100.0, 0.2);
        near(left.output, 240.0, 0.25);
        near(left.think_high, 2000.0, 0.25);
    }

    #[test]
    fn who_has_thought_for_long_goes_on_for_longer() {
        // One in four thinks for 20 times as long.
        let mut forecast = Forecast::default();
        after(1, (0..400).map(|i| (if i % 4 == 0 { 8000 } else { 400 }, 10)), &mut forecast);
        let (mut course, mut at) = (Course::NEW, 0);
        let mut left_after = |tokens: u32| {
            while at < tokens {
                at += 1;
                forecast.passed(1, &mut course, false, at);
            }
            forecast.left(1, course, at, 0).think
        };
        let (first, late) = (left_after(1), left_after(1000));
        near(first, 2300.0, 0.3);
        near(late, 7000.0, 0.3);
    }

    #[test]
    fn without_thinking_none_is_forecast_and_a_new_tenant_is_as_all() {
        let mut forecast = Forecast::default();
        after(1, (0..100).map(|_| (0, 50)), &mut forecast);
        let left = forecast.left(1, Course::NEW, 0, 0);
        assert!(left.think < 10.0, "{left:?}");
        assert_eq!(forecast.left(2, Course::NEW, 0, 0), forecast.left(0, Course::NEW, 0, 0));
        assert!(forecast.left(7, Course::NEW, 0, 0).output > 20.0);
    }

    #[test]
    fn absurd_numbers_stay_within_bounds() {
        let mut forecast = Forecast::default();
        let mut course = Course::NEW;
        for tokens in [1, 5, u32::MAX - 1, u32::MAX - 1] {
            forecast.passed(u32::MAX, &mut course, false, tokens);
            forecast.refresh();
            let left = forecast.left(u32::MAX, course, tokens, u32::MAX);
            assert!((0.0..1e6).contains(&left.think) && (0.0..1e6).contains(&left.output), "{left:?}");
        }
        assert!(forecast.tenants.is_empty());
    }
}
