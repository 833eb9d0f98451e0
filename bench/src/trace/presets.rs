//! Workloads by name, and the figures that they are fitted to.

use super::{Arrivals, Mode, Prompt, Regime, Sessions, Tenants, Workload, WorkloadError};

impl Workload {
    /// Names of the presets, as the command line takes them.
    pub const NAMES: [&str; 3] = ["reasoning-chat", "plain-chat", "multi-turn"];

    /// A preset.
    ///
    /// # Errors
    /// [`WorkloadError::UnknownName`], with the known ones.
    pub fn named(name: &str) -> Result<Self, WorkloadError> {
        match name {
            "reasoning-chat" => Ok(Self::reasoning_chat()),
            "plain-chat" => Ok(Self::plain_chat()),
            "multi-turn" => Ok(Self::multi_turn()),
            _ => Err(WorkloadError::UnknownName { name: name.to_owned(), known: Self::NAMES.join(", ") }),
        }
    }
}

impl Default for Workload {
    fn default() -> Self {
        Self::reasoning_chat()
    }
}

impl Workload {
    /// DeepSeek-R1 traffic of a cloud: ServeGen's `data/reason/deepseek-r1` (Apache-2.0, commit f891d118), two hours,
    /// 7,551 requests with the fields drawn independently. 200,000 generated requests, seed 1, against that sample:
    ///
    /// | tokens | mean | p50 | p95 |
    /// |---|---|---|---|
    /// | prompt | 924 for 937 | 115 for 117 | 4,875 for 5,034 |
    /// | thinking | 2,494 for 2,480 | 1,536 for 1,526 | 8,140 for 8,008 |
    /// | answer | 549 for 557 | 272 for 305 | 1,955 for 2,045 |
    ///
    /// The mean share of thinking is 0.74, as ServeGen measures it within requests; so thinking and answer are not
    /// independent here, as they are in the sample. The sample has no conversations, and neither has this.
    pub fn reasoning_chat() -> Self {
        let mode = |weight, think_share, concentration, generated_median, generated_sigma| Mode {
            weight,
            think_share,
            concentration,
            generated_median,
            generated_sigma,
        };
        Self {
            requests_per_s: 1.05,
            arrivals: Arrivals {
                regime: Some(Regime { factor: 1.25, share: 0.3, cycle_s: 900.0 }),
                ..Arrivals::default()
            },
            prompt: Prompt::default(),
            modes: vec![mode(0.70, 0.895, 11.4, 2616.0, 0.84), mode(0.30, 0.38, 4.0, 915.0, 0.98)],
            most_generated_tokens: 42_000,
            tenants: Tenants::default(),
            classes: Vec::new(),
            sessions: Sessions::default(),
        }
    }

    /// Chat that does not think: `azure2023_conv` (Azure LLM inference trace 2023, CC-BY-4.0), 19,366 requests in an
    /// hour with a mean of 1,155 prompt and 211 generated tokens, short answers and answers near 400 tokens. The trace
    /// names no tenants.
    pub fn plain_chat() -> Self {
        let mode = |weight, generated_median, generated_sigma| Mode {
            weight,
            think_share: 0.0,
            concentration: 1.0,
            generated_median,
            generated_sigma,
        };
        Self {
            requests_per_s: 5.5,
            arrivals: Arrivals { gap_cv: 1.09, wave: None, regime: None },
            prompt: Prompt {
                median: 760.0,
                sigma: 0.55,
                tail_share: 0.1,
                tail_from: 2600.0,
                tail_to: 5300.0,
                tail_alpha: 0.05,
                most_tokens: 14_050,
            },
            modes: vec![mode(0.6, 85.0, 0.4), mode(0.4, 400.0, 0.12)],
            most_generated_tokens: 1000,
            tenants: Tenants { count: 1, exponent: 0.0, scale_sigma: 0.0 },
            ..Self::reasoning_chat()
        }
    }

    /// Long conversations that do not think, with the lengths and the prefix reuse of Mooncake's `conversation` trace
    /// (Apache-2.0): 3.4 requests a second, a mean of 12,035 prompt and 343 generated tokens, 37 % of prompt blocks
    /// seen before. The gaps between turns are a guess, as the trace does not tell conversations apart.
    pub fn multi_turn() -> Self {
        let mode = |weight, generated_median, generated_sigma| Mode {
            weight,
            think_share: 0.0,
            concentration: 1.0,
            generated_median,
            generated_sigma,
        };
        Self {
            requests_per_s: 3.4,
            arrivals: Arrivals::default(),
            prompt: Prompt {
                median: 5000.0,
                sigma: 0.9,
                tail_share: 0.09,
                tail_from: 20_000.0,
                tail_to: 110_000.0,
                tail_alpha: 0.9,
                most_tokens: 126_000,
            },
            modes: vec![mode(0.25, 25.0, 0.9), mode(0.75, 415.0, 0.35)],
            most_generated_tokens: 2000,
            tenants: Tenants { count: 1, exponent: 0.0, scale_sigma: 0.0 },
            sessions: Sessions {
                share: 0.3,
                mean_turns: 2.5,
                gap_median_s: 60.0,
                gap_sigma: 1.0,
                text_median: 1000.0,
                text_sigma: 1.0,
                most_prompt_tokens: 131_072,
            },
            ..Self::reasoning_chat()
        }
    }
}

impl Default for Arrivals {
    /// The sample's gaps have a coefficient of variation of 1.26 over two hours, 1.2 within a hundred requests. Its
    /// rate over five minutes varies by 15 % around the mean, which is the regime of the preset.
    fn default() -> Self {
        Self { gap_cv: 1.2, wave: None, regime: None }
    }
}

impl Default for Prompt {
    fn default() -> Self {
        Self {
            median: 98.7,
            sigma: 1.066,
            tail_share: 0.107,
            tail_from: 775.0,
            tail_to: 26_740.0,
            tail_alpha: 0.0132,
            most_tokens: 52_000,
        }
    }
}

impl Default for Tenants {
    /// The sample's busiest client of 29 sends 52 % of the requests, the next 9 %; Zipf's law with the same
    /// first has 15 % for the second.
    fn default() -> Self {
        Self { count: 29, exponent: 1.75, scale_sigma: 0.15 }
    }
}

impl Default for Sessions {
    /// No conversations; once `share` is set, chats of three turns a minute apart.
    fn default() -> Self {
        Self {
            share: 0.0,
            mean_turns: 3.0,
            gap_median_s: 60.0,
            gap_sigma: 1.0,
            text_median: 100.0,
            text_sigma: 1.0,
            most_prompt_tokens: 131_072,
        }
    }
}
