//! Made-up results that look like those of a replay.

#![allow(dead_code, reason = "every test file uses another part")]

use std::collections::BTreeMap;

use meridian_bench::results::{
    EngineFacts, Event, METRICS, MadeBy, Results, Run, SCHEMA, Slo, TenantRow, TimelinePoint, TraceFacts,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// What to make up.
pub struct Made<'a> {
    pub policies: &'a [&'a str],
    pub rates: &'a [f64],
    pub seeds: &'a [u64],
    pub tenants: &'a [&'a str],
    pub event: &'a str,
    pub batches: usize,
    /// Changes what the requests did, not the requests.
    pub noise_seed: u64,
    /// Factor on everything where lower is better.
    pub slower: f64,
}

impl Default for Made<'_> {
    fn default() -> Self {
        Self {
            policies: &["native:fcfs", "output-first.wasm", "deadline-aware.wasm"],
            rates: &[4.0],
            seeds: &[1],
            tenants: &["alpha", "beta", "gamma"],
            event: "dispatch: output-first.wasm in place of native:fcfs",
            batches: 20,
            noise_seed: 0,
            slower: 1.0,
        }
    }
}

pub fn random(seed: u64) -> Pcg64Mcg {
    Pcg64Mcg::seed_from_u64(seed)
}

/// Nearly normal, mean 0, deviation 1.
pub fn normal(random: &mut Pcg64Mcg) -> f64 {
    (0..12).map(|_| random.random::<f64>()).sum::<f64>() - 6.0
}

impl Made<'_> {
    pub fn results(&self) -> Results {
        let mut runs = Vec::new();
        for &rate in self.rates {
            for &seed in self.seeds {
                runs.extend((0..self.policies.len()).map(|policy| self.run(policy, rate, seed)));
            }
        }
        Results {
            schema: SCHEMA,
            made_by: MadeBy {
                version: "0.1.0".into(),
                command: "meridian bench replay --trace reason.csv --policy native:fcfs".into(),
                machine: "2 cores".into(),
            },
            trace: TraceFacts {
                source: "reason.csv".into(),
                requests: 2000,
                duration_s: 500.5,
                rate: 4.0,
                mean_tokens: [937.0, 2480.0, 557.25],
            },
            engine: EngineFacts {
                preset: "h100-8b".into(),
                engines: 2,
                router: "round-robin".into(),
                step_model: BTreeMap::from([("base_us".into(), 4200.0), ("decode_us_per_seq".into(), 31.5)]),
                max_num_seqs: 256,
                max_num_batched_tokens: 8192,
                kv_blocks: 30_000,
                block_tokens: 16,
                slo: Slo::default(),
            },
            baseline: self.policies[0].into(),
            runs,
            given_up: Vec::new(),
            most_in_time: None,
            notes: Vec::new(),
        }
    }

    fn run(&self, policy: usize, rate: f64, seed: u64) -> Run {
        let mut random = random(seed * 1000 + policy as u64 + self.noise_seed * 77_777);
        let load = 1.0 + rate / 8.0;
        let factor = load * (1.0 - 0.12 * (policy % 5) as f64);
        let mut metrics = |spread: f64| -> BTreeMap<String, f64> {
            let values = METRICS.iter().enumerate().map(|(at, metric)| {
                let noise = (spread * normal(&mut random)).exp();
                let value = match metric.key {
                    "goodput_rps" => rate.min(6.0 + policy as f64) * 0.97 * noise,
                    "faults" => 0.0,
                    key if key.contains("attainment") || key.contains("qoe") || key.contains("fairness") => {
                        (1.0 - 0.02 * rate * factor).clamp(0.05, 1.0) * noise.min(1.0)
                    }
                    key if key.contains("rate") || key.contains("kv_used") => 0.6 * noise.min(1.5),
                    key if key.contains("preempt") => (30.0 * factor * noise).round(),
                    _ => (10.0 + 40.0 * at as f64) * factor * noise * self.slower,
                };
                (metric.key.to_owned(), value)
            });
            values.collect()
        };
        let whole = metrics(0.01);
        let batches = (0..self.batches).map(|_| metrics(0.05)).collect();
        let curve = |scale: f64, spread: f64| -> Vec<[f64; 2]> {
            let at = |i: i32| {
                let z = 3.0 * (f64::from(i) / 100.0 - 1.0);
                [scale * factor * (spread * z).exp(), 1.0 / (1.0 + (-1.7 * z).exp())]
            };
            let mut points: Vec<[f64; 2]> = (0..=200).map(at).collect();
            points[0][1] = 0.0;
            points[200][1] = 1.0;
            points
        };
        let curves = [
            ("ttft", 300.0, 0.8),
            ("ttfo", 9000.0, 1.2),
            ("ttot", 60.0, 1.1),
            ("e2e", 20_000.0, 0.9),
            ("itl_think", 24.0, 0.3),
            ("itl_output", 18.0, 0.35),
        ];
        let timeline = (0..1024).map(|i| {
            let wave = 1.0 + 0.7 * (f64::from(i) / 90.0 + policy as f64).sin();
            TimelinePoint {
                t_s: f64::from(i) * 0.5,
                waiting: (8.0 * rate * (wave - 0.9)).max(0.0),
                prefill: 3.0 * wave,
                think: 40.0 * wave * load,
                output: 15.0 * load,
                kv_used: (0.4 * wave * load / 1.6).min(0.95),
                kv_cached: 0.05 + 0.02 * wave,
            }
        });
        let tenants = self.tenants.iter().enumerate().map(|(at, name)| TenantRow {
            name: (*name).into(),
            requests: 900 / (at as u64 + 1),
            service_tokens: 2_000_000 / (at as u64 + 1),
            ttfo_p50_ms: 6000.0 * factor,
            ttfo_p99_ms: (30_000.0 + 9000.0 * ((at * 7 + policy) % 5) as f64) * factor,
            slo_attainment: 0.9,
        });
        let events = if policy == 1 {
            [120.0, 123.0, 300.0].map(|t_s| Event { t_s, what: self.event.into() }).to_vec()
        } else {
            Vec::new()
        };
        Run {
            slots: [].into(),
            policy: self.policies[policy].into(),
            rate,
            seed,
            metrics: whole,
            batches,
            curves: curves.iter().map(|&(name, scale, spread)| (name.to_owned(), curve(scale, spread))).collect(),
            timeline: timeline.collect(),
            tenants: tenants.collect(),
            events,
            levels: Vec::new(),
        }
    }
}

/// Panics unless every tag is closed in order, attributes are quoted and nothing is left of a `<`.
pub fn assert_well_formed(html: &str) {
    const VOID: [&str; 3] = ["meta", "br", "!DOCTYPE"];
    let mut open = Vec::<&str>::new();
    let mut rest = html;
    while let Some(at) = rest.find('<') {
        rest = &rest[at + 1..];
        let end = rest.find('>').unwrap_or_else(|| panic!("no end: {}", &rest[..rest.len().min(80)]));
        let (tag, after) = (&rest[..end], &rest[end + 1..]);
        rest = after;
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap_or("");
        let good = !name.is_empty() && (name == "!DOCTYPE" || name.chars().all(|c| c.is_ascii_alphanumeric()));
        assert!(good, "not a tag: <{tag}>");
        assert_eq!(tag.matches('"').count() % 2, 0, "quotes: <{tag}>");
        assert!(!tag.contains('<'), "nested: <{tag}>");
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "closed by </{name}>");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
        if name == "style" && !tag.starts_with('/') {
            rest = &rest[rest.find("</style>").expect("the style ends")..];
        }
    }
    assert!(open.is_empty(), "open at the end: {open:?}");
}
