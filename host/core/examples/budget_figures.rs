//! What does it cost to follow requests that think, and how often is a budget policy asked? One JSON object a line.
//!
//!     budget_figures
//!
//! 256 requests think with every signal off. Each step generates one token for each; every eighth ends a line. The same with no
//! line that ends is what the host's upkeep costs where boundaries are nobody's business. Rounds of both alternate, and the
//! figure is the median of the ratios.

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement, not a service")]

use std::time::Instant;

use meridian_core::budget::{ClientBudget, EndRules, Load, Order, ThinkBudgets, ThinkSettings, Thresholds};
use meridian_core::slot::BudgetSlot;
use meridian_core::{Budget, Markers, MeridianConfig, NewRequest, RequestTable, native};

const REQUESTS: u64 = 256;
const STEPS: u32 = 4096;
const ROUNDS: usize = 15;
const INTERVAL: u32 = 32;
const LINE_EVERY: u32 = 8;
const LINE: u32 = 5;

/// Steps with the policy `name`; seconds, decisions of the slot, and orders to end thinking.
fn run(name: &str, has_lines: bool) -> (f64, u64, usize) {
    let targets = MeridianConfig::default().scheduler.targets();
    let mut slot = BudgetSlot::new(native::policy::<Budget>(name, targets, "{}").unwrap(), targets);
    let configured = Thresholds {
        min_think_tokens: 0,
        max_think_tokens: 1 << 24,
        eat_probe_interval_tokens: INTERVAL,
        eat_variance_threshold: 0.0,
        rpdi_threshold: f64::INFINITY,
        ..Thresholds::default()
    };
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap();
    let mut table = RequestTable::new(markers.clone());
    let mut budgets = ThinkBudgets::new(ThinkSettings {
        configured,
        line_ends: [LINE].into(),
        boundaries: [LINE].into(),
        ..ThinkSettings::new(EndRules::new(markers, vec![]).unwrap())
    });
    let mut rows = Vec::new();
    for _ in 0..REQUESTS {
        let request = NewRequest { prompt: &[1, 7], ..NewRequest::default() };
        let row = table.insert(&request).unwrap();
        budgets.enroll(&mut table, row, "request", ClientBudget::default());
        rows.push(row);
    }
    let mut events = Vec::new();
    let load = Load { thinking: REQUESTS as u32, total_blocks: 1, ..Load::default() };
    let mut ended = 0;
    let started = Instant::now();
    for step in 0..STEPS {
        let load = Load { now_ms: f64::from(step), ..load };
        ended += Order::read_all(budgets.decide(&mut table, &mut slot, load)).count();
        let token = if has_lines && step % LINE_EVERY == LINE_EVERY - 1 { LINE } else { 20 };
        let tokens: Vec<_> = rows.iter().map(|row| (*row, token)).collect();
        table.set_clock(load.now_ms);
        budgets.generated(&mut table, &tokens, &mut events);
    }
    (started.elapsed().as_secs_f64(), slot.control().status().decisions.iter().sum(), ended)
}

fn say(name: &str, value: f64, unit: &str) {
    println!("{}", serde_json::json!({ "name": name, "value": value, "unit": unit }));
}

fn main() {
    for policy in ["eat-rpdi", "fixed-budget", "deadline-aware"] {
        let mut ratios = Vec::with_capacity(ROUNDS);
        let (mut step_us, mut asked, mut ended) = (f64::INFINITY, 0, 0);
        for _ in 0..ROUNDS {
            let (without_s, ..) = run(policy, false);
            let (with_s, decisions, orders) = run(policy, true);
            ratios.push(with_s / without_s);
            step_us = step_us.min(with_s / f64::from(STEPS) * 1e6);
            (asked, ended) = (decisions - 1, orders);
        }
        ratios.sort_unstable_by(f64::total_cmp);
        say(&format!("{policy}: a step with line ends over one without"), ratios[ROUNDS / 2], "ratio");
        say(&format!("{policy}: a step with line ends"), step_us, "us");
        say(&format!("{policy}: calls at boundaries"), asked as f64, "calls");
        // All requests end their lines in the same steps: one call for all, once in the interval.
        let expected = if policy == "deadline-aware" { STEPS / INTERVAL - 1 } else { 0 };
        say(&format!("{policy}: calls expected"), f64::from(expected), "calls");
        say(&format!("{policy}: ends ordered"), ended as f64, "orders");
    }
}
