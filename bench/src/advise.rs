//! Which service level an engine can promise, at which load: stock vLLM beside the default policy that knows the level.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::grid::{SINGLE, STOCK, contend, day};
use crate::policies::PolicySet;
use crate::replay::{Input, Options, Rate, bound, own_rate};
use crate::report::format::{aligned, clean, figure};
use crate::results::{Run, Slo};
use crate::steady::{Capacity, RESIDENCES, capacity, steady};
use crate::tune::{Flags, Load, tune};

/// Share of the requests for which a promise holds.
pub const PROMISED: f64 = 0.95;
/// Parts of what stock vLLM serves at which levels are shown.
const PARTS: [f64; 3] = [0.5, 0.8, 0.95];
/// The burst of the day that is shown, seconds.
const BURST_S: f64 = 300.0;

/// What an engine can promise.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// The engine and its traffic.
    pub engine: String,
    /// See `engine`.
    pub traffic: String,
    /// Rate of the traffic itself, requests a second.
    pub own_rate: f64,
    /// The level that was asked for.
    pub slo: Slo,
    /// Steady rates at which the level can be promised to 95 of 100 requests: of stock vLLM first.
    pub capacities: Vec<Served>,
    /// What can be promised under steady loads.
    pub loads: Vec<Promise>,
    /// A day with a burst of five minutes at 1.6 times what stock vLLM serves.
    pub day: Option<Burst>,
}

/// The highest rate that a scheduler serves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Served {
    /// The scheduler.
    pub name: String,
    /// Flags that differ from stock vLLM's own.
    pub flags: String,
    /// `None` where the level is kept at no rate.
    pub capacity: Option<Capacity>,
}

/// What can be promised at a rate: of each scheduler the share in time, and what 95 of 100 requests need.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Promise {
    /// Requests a second.
    pub rate: f64,
    /// By scheduler: attainment, milliseconds to the first answer token beyond the allowances for prompt and thinking, and
    /// milliseconds between two answer tokens.
    pub needs: BTreeMap<String, [f64; 3]>,
}

/// Shares of a day's requests that are in time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    /// By scheduler.
    pub in_time: BTreeMap<String, f64>,
    /// Of any scheduler, at most.
    pub most: Option<f64>,
}

/// The configured policy, which knows the level.
pub const MERIDIAN: &str = "meridian";
/// The same, where late requests are refused.
pub const REFUSING: &str = "meridian, late refused";

impl Advice {
    /// Advise for the engine and the level of `options`. `promised` are the same options with the level in their
    /// configuration, `refusing` with late requests refused; the baseline of both is the policy. `progress` is told which of
    /// how many parts begins.
    ///
    /// # Errors
    /// Nothing to replay; a policy that faults.
    pub fn of(
        options: &Options,
        promised: &Options,
        refusing: &Options,
        input: &Input,
        progress: &mut dyn FnMut(usize, usize),
    ) -> anyhow::Result<Self> {
        let mut part = 0;
        let mut next = || {
            progress(part, 4 + PARTS.len());
            part += 1;
        };
        let own = Flags::of(&options.engine);
        let mut advice = Self {
            engine: options.engine_name.clone(),
            traffic: input.name().to_owned(),
            own_rate: own_rate(input)?,
            slo: options.slo,
            ..Self::default()
        };
        next();
        let stock = capacity(options, input, PROMISED)?;
        let at = |name: &str, flags: Flags, capacity| Served { name: name.into(), flags: flags.over(own), capacity };
        advice.capacities.push(at(STOCK, own, stock));
        next();
        let policy = capacity(promised, input, PROMISED)?;
        let Some(rate) = stock.or(policy).map(|found| found.doubled) else {
            advice.capacities.push(at(MERIDIAN, own, policy));
            return Ok(advice);
        };
        next();
        let course = Some(steady(options, input, rate, RESIDENCES, 0.0)?.course);
        let load = Load { name: "capacity".into(), rate: Rate::PerSecond(rate), course };
        let best = tune(options, input, &[load], &mut || {})?.best;
        let tuned = Options { engine: best.set(&options.engine), ..options.clone() };
        let of_tuned = if best == own { stock } else { capacity(&tuned, input, PROMISED)? };
        advice.capacities.push(at(SINGLE, best, of_tuned));
        advice.capacities.push(at(MERIDIAN, own, policy));
        for part in PARTS {
            next();
            let rate = rate * part;
            let mut promise = Promise { rate, ..Promise::default() };
            for (name, options) in [(STOCK, options), (MERIDIAN, promised)] {
                let run = steady(options, input, rate, RESIDENCES, 0.0)?.run;
                promise.needs.insert(name.into(), needs(&run));
            }
            advice.loads.push(promise);
        }
        next();
        let residence_s = stock.or(policy).map_or(0.0, |found| found.residence_s);
        let course = Some(day(BURST_S, residence_s));
        let load = Load { name: "day".into(), rate: Rate::PerSecond(rate), course: course.clone() };
        let mut burst = Burst::default();
        for (name, options, flags) in
            [(STOCK, options, own), (SINGLE, options, best), (MERIDIAN, promised, own), (REFUSING, refusing, own)]
        {
            let baseline: &PolicySet = &options.baseline;
            let run = contend(options, input, &load, flags, Some(baseline))?;
            burst.in_time.insert(name.into(), run.metrics.get("slo_attainment").copied().unwrap_or(0.0));
        }
        let of_day = Options { rates: vec![load.rate], course, ..options.clone() };
        burst.most = bound(&of_day, input)?;
        advice.day = Some(burst);
        Ok(advice)
    }

    /// For a terminal.
    #[must_use]
    pub fn text(&self) -> String {
        let Slo { ttfo_ms, prompt_ms, think_ms, tpot_ms, .. } = self.slo;
        let mut out = format!(
            "{}, {}: {} requests/s of its own\nLevel: first answer token within {} ms, {} ms more a prompt token, {} ms more a thinking \
             token; then a token every {} ms\n\nSteady rates at which 95 of 100 requests are in time\n",
            clean(&self.engine),
            clean(&self.traffic),
            figure(self.own_rate),
            figure(ttfo_ms),
            figure(prompt_ms),
            figure(think_ms),
            figure(tpot_ms)
        );
        let stock = self.capacities.first().and_then(|served| served.capacity).map(|found| found.doubled);
        let mut rows = vec![["", "flags", "requests/s", "over stock"].map(str::to_owned).to_vec()];
        for Served { name, flags, capacity } in &self.capacities {
            let note = match capacity {
                Some(found) if !found.converged => format!("{flags} (not converged)"),
                _ => flags.clone(),
            };
            let rate = capacity.map(|found| found.doubled);
            let over = rate.zip(stock).map(|(rate, stock)| rate / stock);
            let shown = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), figure);
            rows.push(vec![name.clone(), note.trim().to_owned(), shown(rate), shown(over)]);
        }
        out += &aligned(&rows, 2);
        if !self.loads.is_empty() {
            out += "\n\nWhat 95 of 100 requests need: ttfo_ms beside these allowances, tpot_ms (each alone)\n";
            let mut rows = vec![["requests/s", STOCK, MERIDIAN].map(str::to_owned).to_vec()];
            for Promise { rate, needs } in &self.loads {
                let shown = |name: &str| {
                    needs.get(name).map_or_else(
                        || "-".to_owned(),
                        |[in_time, ttfo_ms, tpot_ms]| {
                            format!("{} ms, {} ms (in time: {})", figure(*ttfo_ms), figure(*tpot_ms), figure(*in_time))
                        },
                    )
                };
                rows.push(vec![figure(*rate), shown(STOCK), shown(MERIDIAN)]);
            }
            out += &aligned(&rows, 0);
        }
        if let Some(Burst { in_time, most }) = &self.day {
            out += "\n\nIn time through a day of 0.6, 1.6 (five minutes) and 0.6 of what stock vLLM serves\n";
            let mut rows = vec![["", "in time"].map(str::to_owned).to_vec()];
            rows.extend(in_time.iter().map(|(name, share)| vec![name.clone(), figure(*share)]));
            rows.extend(most.map(|most| vec!["any scheduler, at most".to_owned(), figure(most)]));
            out += &aligned(&rows, 1);
        }
        out += "\n\nmeridian.toml:\n";
        out += &self.toml();
        out
    }

    /// The configuration that promises the level: the one that was asked for where the default policy keeps it at the rate of the
    /// traffic or at 0.95 of what stock vLLM serves, whichever is lower; else what it needs there.
    #[must_use]
    pub fn toml(&self) -> String {
        let Slo { ttfo_ms, prompt_ms, think_ms, tpot_ms, .. } = self.slo;
        let [mut needed_ttfo_ms, mut needed_tpot_ms] = [ttfo_ms, tpot_ms];
        let at = self.loads.iter().find(|load| load.rate >= self.own_rate).or(self.loads.last());
        if let Some([in_time, ttfo_ms, tpot_ms]) = at.and_then(|load| load.needs.get(MERIDIAN))
            && *in_time < PROMISED
        {
            // Two digits: nobody promises more.
            let up = |ms: f64| {
                let unit = 10f64.powf(ms.max(1.0).log10().floor() - 1.0);
                (ms / unit).ceil() * unit
            };
            needed_ttfo_ms = needed_ttfo_ms.max(up(*ttfo_ms));
            needed_tpot_ms = needed_tpot_ms.max(up(*tpot_ms));
        }
        let waits = f64::from(meridian_core::config::ServiceLevel::default().longest_wait_ms);
        let longest =
            if needed_ttfo_ms > waits { format!("longest_wait_ms = {needed_ttfo_ms:.1}\n") } else { String::new() };
        format!(
            "[service_levels.default]\nttfo_ms = {needed_ttfo_ms:.1}\nprompt_ms_per_token = {prompt_ms:.3}\n\
             think_ms_per_token = {think_ms:.3}\ntpot_ms = {needed_tpot_ms:.1}\nlate = \"last\"  # or \"refuse\": HTTP 503\n\
             {longest}default = true\n"
        )
    }
}

fn needs(run: &Run) -> [f64; 3] {
    let of = |key: &str| run.metrics.get(key).copied().unwrap_or(f64::NAN);
    // A histogram has no zero.
    let ttfo_ms = of("ttfo_beyond_p95_ms");
    [of("slo_attainment"), if ttfo_ms < 1.0 { 0.0 } else { ttfo_ms }, of("tpot_p95_ms")]
}
