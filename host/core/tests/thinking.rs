//! Budgets as the thread that schedules drives them: what is measured, decided and ordered.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use meridian_core::budget::{
    BudgetStatus, ClientBudget, EndRules, Enrolled, Load, Measured, Order, Point, Report, Signal, ThinkBudgets,
    ThinkSettings, Thresholds, Verdict,
};
use meridian_core::config::ProbeAt;
use meridian_core::slot::{BudgetSlot, Contender};
use meridian_core::{
    Batch, Budget, BudgetColumn, BudgetDecision, Description, Fault, Markers, MeridianConfig, NewRequest, Policy,
    RequestTable, RowId, native,
};

const LINE: u32 = 5;

fn slot(name: &str, options: &str) -> BudgetSlot {
    let targets = MeridianConfig::default().scheduler.targets();
    BudgetSlot::new(native::policy::<Budget>(name, targets, options).expect("a native policy"), targets)
}

/// A level of half a bit ends thinking at the first probe that counts.
fn level() -> Thresholds {
    Thresholds {
        min_think_tokens: 0,
        max_think_tokens: 50,
        eat_probe_interval_tokens: 2,
        ema_alpha: 1.0,
        eat_variance_threshold: 1e9,
        eat_max_bits: 0.5,
        min_probes: 0,
        rpdi_window: 4,
        rpdi_threshold: f64::INFINITY,
    }
}

/// The budgets, and the table of the requests that they are about.
struct Followed {
    budgets: ThinkBudgets,
    table: RequestTable,
    rows: HashMap<u64, RowId>,
}

impl Followed {
    fn new(settings: ThinkSettings) -> Self {
        let mut table = RequestTable::new(markers());
        // So that the first one that a test adds, with the number 1, is in row 1.
        table.insert(&NewRequest::default()).expect("finite times");
        Self { budgets: ThinkBudgets::new(settings), table, rows: HashMap::new() }
    }

    fn row(&self, key: u64) -> Option<RowId> {
        self.rows.get(&key).copied().filter(|row| self.table.get(*row).is_some())
    }

    fn generated(&mut self, key: u64, tokens: &[u32], now_ms: f64) {
        let row = self.row(key).expect("it was added");
        let tokens: Vec<_> = tokens.iter().map(|token| (row, *token)).collect();
        self.table.set_clock(now_ms);
        self.budgets.generated(&mut self.table, &tokens, &mut Vec::new());
    }

    fn remove(&mut self, key: u64) {
        let row = self.row(key).expect("it was added");
        self.budgets.finished(&self.table, row);
        self.table.remove(row);
    }

    fn limit(&mut self, key: u64, max_think_tokens: u32) -> bool {
        self.row(key).is_some_and(|row| self.budgets.limit(&mut self.table, row, max_think_tokens))
    }

    fn chunks(&mut self, key: u64, is_chunk: bool) -> Vec<Order> {
        let row = self.row(key).expect("it was added");
        Order::read_all(self.budgets.chunks(&mut self.table, &[(row, is_chunk)])).collect()
    }

    fn received(&mut self, message: &[u8]) {
        self.budgets.received(&mut self.table, message);
    }

    fn due(&self) -> std::vec::IntoIter<(u64, u32)> {
        self.budgets.due(&self.table).into_iter()
    }

    fn probe_runs(&mut self, key: u64, tokens: u32) {
        self.budgets.probe_runs(&mut self.table, key, tokens);
    }

    fn probed(&mut self, key: u64, answer: Option<u32>) {
        self.budgets.probed(&mut self.table, key, answer);
    }

    fn decide(&mut self, slot: &mut BudgetSlot, load: Load) -> &[u8] {
        self.budgets.decide(&mut self.table, slot, load)
    }

    fn status(&self) -> BudgetStatus {
        self.budgets.status()
    }

    fn record_signals(&mut self, keep: bool) {
        self.budgets.record_signals(keep);
    }

    fn take_signals(&mut self) -> Vec<Signal> {
        self.budgets.take_signals()
    }
}

fn markers() -> Markers {
    Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("valid markers")
}

fn budgets(configured: Thresholds, tokens_ahead: u32) -> Followed {
    Followed::new(settings(configured, tokens_ahead))
}

fn settings(configured: Thresholds, tokens_ahead: u32) -> ThinkSettings {
    ThinkSettings {
        configured,
        measures: true,
        can_probe: true,
        probe_at: ProbeAt::Interval,
        block_tokens: 16,
        line_ends: [LINE].into(),
        boundaries: [LINE].into(),
        guards_eos: true,
        tokens_ahead,
        ..ThinkSettings::new(EndRules::new(markers(), vec![]).expect("an end marker"))
    }
}

fn add(followed: &mut Followed, key: u64, client: ClientBudget) -> Enrolled {
    let request = NewRequest { prompt: &[1, 7], max_tokens: 100, ..NewRequest::default() };
    let row = followed.table.insert(&request).expect("finite times");
    followed.rows.insert(key, row);
    followed.budgets.enroll(&mut followed.table, row, &format!("r{key}"), client).expect("the row is live")
}

fn orders(budgets: &mut Followed, slot: &mut BudgetSlot) -> Vec<Order> {
    Order::read_all(budgets.decide(slot, Load::default())).collect()
}

fn probe(budgets: &mut Followed, key: u64, nats: f32, answer: u32) {
    let at = budgets.due().find(|(due, _)| *due == key).map_or(0, |(_, at)| at);
    budgets.probe_runs(key, 3);
    let mut message = Vec::new();
    Report { key, token: at, ahead: 0, what: Measured::Probe, entropy_nats: nats, confidence: f32::NAN }
        .write(&mut message);
    budgets.received(&message);
    budgets.probed(key, Some(answer));
}

#[test]
fn a_settled_probe_orders_the_end_at_the_next_token_that_is_not_under_way() {
    for tokens_ahead in [0, 1] {
        let (mut budgets, mut slot) = (budgets(level(), tokens_ahead), slot("eat-rpdi", "{}"));
        add(&mut budgets, 1, ClientBudget::default());
        assert_eq!(orders(&mut budgets, &mut slot), []);
        budgets.generated(1, &[20, 21], 1.0);
        assert_eq!(budgets.due().collect::<Vec<_>>(), [(1, 2)]);
        probe(&mut budgets, 1, 2.0, 3);
        assert_eq!(orders(&mut budgets, &mut slot), [], "not sure yet");
        budgets.generated(1, &[22, 23], 2.0);
        probe(&mut budgets, 1, 0.1, 3);
        let from = 4 + tokens_ahead;
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from, max_think_tokens: 0 }]);
        assert_eq!(orders(&mut budgets, &mut slot), [], "said once");
        budgets.generated(1, &vec![24; tokens_ahead as usize], 3.0);
        budgets.generated(1, &[8], 3.0);
        assert_eq!(budgets.status().forced, [0, 0, 1, 0, 0, 0, 0, 0], "EAT is the reason");
        assert_eq!((budgets.status().missed, budgets.status().probes_done), (0, 2));
        budgets.remove(1);
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Gone { key: 1 }]);
        assert_eq!((budgets.status().thought, budgets.status().think_tokens), (1, 5 + u64::from(tokens_ahead)));
    }
}

#[test]
fn a_token_that_was_not_forced_is_counted_as_missed() {
    let mut budgets = budgets(Thresholds { max_think_tokens: 1, ..level() }, 0);
    add(&mut budgets, 1, ClientBudget::default());
    budgets.generated(1, &[20, 21], 1.0);
    assert_eq!((budgets.status().missed, budgets.status().forced[0]), (1, 0), "it is still due");
    budgets.generated(1, &[8], 1.0);
    assert_eq!((budgets.status().missed, budgets.status().forced[0]), (1, 1));
}

#[test]
fn a_token_that_a_mask_kept_from_being_forced_is_counted_as_waiting() {
    let mut budgets = budgets(Thresholds { max_think_tokens: 1, ..level() }, 0);
    add(&mut budgets, 1, ClientBudget { has_mask: true, ..ClientBudget::default() });
    budgets.generated(1, &[20, 21, 22, 8], 1.0);
    let status = budgets.status();
    assert_eq!((status.missed, status.waited, status.forced[0]), (0, 2, 1));
}

#[test]
fn a_request_that_nothing_may_end_is_followed_only_once_something_may() {
    let settings = ThinkSettings::new(EndRules::new(markers(), vec![]).expect("an end marker"));
    let (mut budgets, mut slot) = (Followed::new(settings), slot("eat-rpdi", "{}"));
    let enrolled = add(&mut budgets, 1, ClientBudget::default());
    assert_eq!((enrolled.key, enrolled.limits.is_followed), (1, false));
    budgets.generated(1, &[20, 21, 22], 1.0);
    assert_eq!(orders(&mut budgets, &mut slot), []);
    let row = budgets.row(1).expect("live");
    assert!(!budgets.budgets.is_active(&budgets.table));
    assert!(budgets.budgets.enroll_late(&mut budgets.table, row, "r1"));
    assert!(!budgets.budgets.enroll_late(&mut budgets.table, row, "r1"), "followed already");
    assert!(budgets.limit(1, 3));
    let limits = orders(&mut budgets, &mut slot);
    assert_eq!(limits.last(), Some(&Order::Limit { key: 1, from: 3, max_think_tokens: 3 }));
    budgets.generated(1, &[8], 2.0);
    assert_eq!((budgets.status().forced[0], budgets.status().missed), (1, 0));
    // What a client asks for, and a limit that a request may reach.
    for (key, client) in [
        (2, ClientBudget { max_think_tokens: Some(5), ..ClientBudget::default() }),
        (3, ClientBudget { reports: true, ..ClientBudget::default() }),
    ] {
        assert!(add(&mut budgets, key, client).limits.is_followed, "{key}");
    }
}

#[test]
fn a_client_may_have_less_or_its_own_thresholds_and_never_more() {
    let mut budgets = budgets(level(), 0);
    let limited =
        |max_think_tokens| ClientBudget { max_think_tokens: Some(max_think_tokens), ..ClientBudget::default() };
    assert_eq!(add(&mut budgets, 1, limited(9)).limits.max_think_tokens, 9);
    assert_eq!(add(&mut budgets, 2, limited(900)).limits.max_think_tokens, 50);
    // Sure enough for the operator, not for this client, whom the policy does not see.
    let own = ClientBudget { eat_max_bits: Some(0.01), ..ClientBudget::default() };
    add(&mut budgets, 3, own);
    add(&mut budgets, 4, ClientBudget { is_off: true, ..ClientBudget::default() });
    let mut slot = slot("eat-rpdi", "{}");
    orders(&mut budgets, &mut slot);
    for key in [3, 4] {
        budgets.generated(key, &[20, 21], 1.0);
    }
    assert_eq!(budgets.due().collect::<Vec<_>>(), [(3, 2)], "one that is off is not probed");
    probe(&mut budgets, 3, 0.1, 3);
    assert_eq!(orders(&mut budgets, &mut slot), []);
}

#[test]
fn a_changed_limit_takes_effect_while_the_request_thinks() {
    let (mut budgets, mut slot) = (budgets(level(), 0), slot("eat-rpdi", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20; 10], 1.0);
    let key = 1;
    let unfollowed = budgets.table.insert(&NewRequest::default()).expect("finite times");
    budgets.rows.insert(99, unfollowed);
    assert!(budgets.limit(key, 12) && !budgets.limit(99, 12), "nobody follows the other");
    budgets.table.remove(unfollowed);
    assert!(!budgets.budgets.limit(&mut budgets.table, unfollowed, 12), "it is over");
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key, from: 10, max_think_tokens: 12 }]);
    assert!(budgets.limit(key, 5));
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key, from: 10, max_think_tokens: 5 }]);
    budgets.generated(1, &[8], 2.0);
    assert_eq!((budgets.status().forced[0], budgets.status().missed), (1, 0));
}

#[test]
fn a_policy_that_is_swapped_in_decides_about_those_who_think_already() {
    let (mut budgets, mut slot) = (budgets(level(), 0), slot("eat-rpdi", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20; 3], 1.0);
    let targets = MeridianConfig::default().scheduler.targets();
    let fixed = native::policy::<Budget>("fixed-budget", targets, "{\"think_tokens\": 10}").unwrap();
    slot.control().swap(Contender::new(fixed, "", "native:fixed-budget"));
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 3, max_think_tokens: 10 }]);
}

#[test]
fn entropies_that_a_policy_has_no_use_for_are_not_measured() {
    let (mut budgets, mut slot) =
        (budgets(Thresholds { rpdi_threshold: 2.0, ..level() }, 0), slot("fixed-budget", "{}"));
    assert!(add(&mut budgets, 1, ClientBudget::default()).limits.is_measured);
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Measure { key: 1, on: false }]);
    budgets.generated(1, &[20; 40], 1.0);
    assert_eq!(budgets.due().count(), 0);
}

#[test]
fn probes_are_put_at_the_end_of_a_block_when_the_interval_is_a_block() {
    let mut budgets = budgets(Thresholds { eat_probe_interval_tokens: 16, ..level() }, 0);
    add(&mut budgets, 1, ClientBudget::default());
    let mut cuts = Vec::new();
    for _ in 0..51 {
        budgets.generated(1, &[20], 1.0);
        let due: Vec<_> = budgets.due().collect();
        for (key, tokens) in due {
            cuts.push(tokens);
            probe(&mut budgets, key, 9.0, 1);
        }
    }
    // The prompt has two tokens, blocks 16.
    assert_eq!(cuts, [30, 46]);
}

#[test]
fn a_probe_is_cut_inside_a_step_that_has_several_tokens() {
    let mut budgets = budgets(Thresholds { eat_probe_interval_tokens: 16, ..level() }, 0);
    add(&mut budgets, 1, ClientBudget::default());
    let mut cuts = Vec::new();
    for _ in 0..14 {
        budgets.generated(1, &[20; 4], 1.0);
        let due: Vec<_> = budgets.due().collect();
        for (key, tokens) in due {
            cuts.push(tokens);
            probe(&mut budgets, key, 9.0, 1);
        }
    }
    // Two settle the thinking.
    assert_eq!(cuts, [14, 30]);
}

#[test]
fn a_probe_without_room_gives_way_to_the_next_and_one_of_a_request_that_answers_to_nothing() {
    let mut budgets = budgets(level(), 0);
    add(&mut budgets, 1, ClientBudget::default());
    budgets.generated(1, &[20, 21], 1.0);
    budgets.generated(1, &[22, 23], 1.0);
    assert_eq!(budgets.due().collect::<Vec<_>>(), [(1, 4)]);
    assert_eq!((budgets.status().probes_asked, budgets.status().probes_dropped), (2, 1));
    budgets.generated(1, &[8], 1.0);
    assert_eq!(budgets.due().count(), 0);
    // One that comes back late tells nothing.
    budgets.probed(1, Some(3));
    assert_eq!((budgets.status().probes_done, budgets.status().probes_dropped), (0, 2));
}

#[test]
fn the_index_of_native_rows_ends_thinking_without_a_probe() {
    let configured = Thresholds { rpdi_threshold: 1.5, eat_variance_threshold: 0.0, ..level() };
    let (mut budgets, mut slot) = (budgets(configured, 0), slot("eat-rpdi", "{}"));
    assert!(add(&mut budgets, 1, ClientBudget::default()).limits.is_measured);
    orders(&mut budgets, &mut slot);
    for number in 0..12u32 {
        let mut message = Vec::new();
        let entropy_nats = if number < 8 { 0.1 } else { 3.0 };
        Report { key: 1, token: number, ahead: 0, what: Measured::Native, entropy_nats, confidence: f32::NAN }
            .write(&mut message);
        budgets.received(&message);
        budgets.generated(1, &[if number == 11 { LINE } else { 20 }], 1.0);
    }
    assert_eq!(budgets.due().count(), 0, "EAT is off");
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 12, max_think_tokens: 0 }]);
    budgets.generated(1, &[8], 1.0);
    assert_eq!(budgets.status().forced, [0, 0, 0, 1, 0, 0, 0, 0]);
}

#[test]
fn the_index_is_the_same_when_entropies_come_after_their_tokens() {
    let configured = Thresholds { rpdi_threshold: 1.5, eat_variance_threshold: 0.0, ..level() };
    for late in [1, 3] {
        let (mut budgets, mut slot) = (budgets(configured, 0), slot("eat-rpdi", "{}"));
        add(&mut budgets, 1, ClientBudget::default());
        orders(&mut budgets, &mut slot);
        for number in 0..12 + late {
            budgets.generated(1, &[if number == 11 { LINE } else { 20 }], 1.0);
            let Some(token) = (number + 1u32).checked_sub(late) else { continue };
            assert_eq!(orders(&mut budgets, &mut slot), [], "not before the boundary is measured");
            let mut message = Vec::new();
            let entropy_nats = if token < 8 { 0.1 } else { 3.0 };
            Report { key: 1, token, ahead: 0, what: Measured::Native, entropy_nats, confidence: f32::NAN }
                .write(&mut message);
            // Said twice, it counts once.
            budgets.received(&message);
            budgets.received(&message);
            if token == 11 {
                break;
            }
        }
        let from = 11 + late;
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from, max_think_tokens: 0 }]);
        budgets.generated(1, &[8], 1.0);
        assert_eq!(budgets.status().forced, [0, 0, 0, 1, 0, 0, 0, 0]);
    }
}

#[test]
fn a_probe_whose_entropy_comes_after_it_counts_until_the_next_is_due() {
    let report = |budgets: &mut Followed, token| {
        let mut message = Vec::new();
        Report { key: 1, token, ahead: 0, what: Measured::Probe, entropy_nats: 0.1, confidence: f32::NAN }
            .write(&mut message);
        budgets.received(&message);
    };
    let (mut budgets, mut slot) = (budgets(level(), 0), slot("eat-rpdi", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20, 21], 1.0);
    budgets.probe_runs(1, 3);
    budgets.probed(1, Some(3));
    budgets.generated(1, &[22, 23], 1.0);
    assert_eq!((budgets.status().probes_done, budgets.status().probes_dropped), (0, 1), "the next is due");
    report(&mut budgets, 2);
    assert_eq!(orders(&mut budgets, &mut slot), []);
    budgets.probe_runs(1, 3);
    report(&mut budgets, 2);
    budgets.probed(1, Some(3));
    report(&mut budgets, 2);
    budgets.generated(1, &[24], 1.0);
    assert_eq!((budgets.status().probes_done, budgets.status().probes_dropped), (0, 1), "that was another probe");
    report(&mut budgets, 4);
    report(&mut budgets, 4);
    assert_eq!((budgets.status().probes_done, budgets.status().probes_dropped), (1, 1));
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 5, max_think_tokens: 0 }]);
}

#[test]
fn a_fault_of_the_policy_leaves_the_default_to_judge() {
    // `noop` answers with nothing: the host's own rules decide.
    let (mut budgets, mut slot) = (budgets(level(), 0), slot("noop", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20, 21], 1.0);
    probe(&mut budgets, 1, 0.1, 3);
    assert_eq!(orders(&mut budgets, &mut slot).len(), 1);
    assert_eq!(Verdict::default(), Verdict::Default);
}

/// A policy of the slot's user: notes what it is shown, and ends thinking when `ends` says so.
struct Noting {
    description: Description,
    seen: Arc<Mutex<Vec<Vec<f32>>>>,
    ends: fn(&Load) -> bool,
}

impl Noting {
    fn slot(ends: fn(&Load) -> bool) -> (BudgetSlot, Arc<Mutex<Vec<Vec<f32>>>>) {
        let seen = Arc::default();
        let policy = Self { description: Description::default(), seen: Arc::clone(&seen), ends };
        (BudgetSlot::new(Box::new(policy), MeridianConfig::default().scheduler.targets()), seen)
    }
}

impl Policy<Budget> for Noting {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[BudgetColumn] {
        &[BudgetColumn::ThinkTokens, BudgetColumn::Signal, BudgetColumn::Rpdi]
    }

    fn decide(&mut self, batch: &Batch<'_, Budget>, decision: &mut BudgetDecision) -> Result<(), Fault> {
        if batch.facts.point == Point::Probe {
            self.seen.lock().expect("nobody panicked").push(batch.columns.to_vec());
            let verdict = if (self.ends)(batch.facts) { Verdict::EndNow } else { Verdict::KeepThinking };
            decision.verdicts.resize(batch.candidates, verdict);
        }
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

/// No rule of the host's own is on: a policy alone may end thinking.
fn signals_off() -> Thresholds {
    Thresholds { eat_variance_threshold: 0.0, eat_probe_interval_tokens: 4, ..level() }
}

/// Has nothing measured, as in an engine without a sampler that measures.
fn unmeasured(configured: Thresholds) -> Followed {
    Followed::new(ThinkSettings { measures: false, can_probe: false, ..settings(configured, 0) })
}

#[test]
fn a_policy_is_asked_at_boundaries_where_nothing_is_measured() {
    let (mut budgets, (mut slot, seen)) = (unmeasured(signals_off()), Noting::slot(|load| load.waiting > 3));
    add(&mut budgets, 1, ClientBudget::default());
    add(&mut budgets, 2, ClientBudget::default());
    let mut decide = |budgets: &mut Followed, waiting| {
        let load = Load { waiting, ..Load::default() };
        Order::read_all(budgets.decide(&mut slot, load)).collect::<Vec<_>>()
    };
    assert_eq!(decide(&mut budgets, 0), []);
    // A line ends with every third token of the one, with every one of the other.
    for number in 1..=12 {
        budgets.generated(1, &[if number % 3 == 0 { LINE } else { 20 }], 1.0);
        budgets.generated(2, &[LINE], 1.0);
        assert_eq!(decide(&mut budgets, 0), []);
    }
    let shown = |columns: &Vec<f32>| columns[..columns.len() / 3].to_vec();
    let asked: Vec<_> = seen.lock().unwrap().iter().map(shown).collect();
    assert_eq!(asked, [vec![4.0], vec![6.0], vec![8.0], vec![12.0, 12.0]], "at most once in four tokens, in one call");
    let last = seen.lock().unwrap().last().unwrap().clone();
    assert_eq!(last[2..4], [2.0, 2.0], "a boundary");
    assert!(last[4..].iter().all(|index| index.is_nan()));
    // The load has changed in the middle of the thought.
    budgets.generated(2, &[LINE, 20, 20, LINE], 1.0);
    assert_eq!(decide(&mut budgets, 4), [Order::Limit { key: 2, from: 16, max_think_tokens: 0 }]);
    budgets.generated(2, &[8], 1.0);
    assert_eq!(budgets.status().forced, [0, 1, 0, 0, 0, 0, 0, 0], "the policy is the reason");
}

#[test]
fn a_client_with_rules_of_its_own_is_not_asked_about() {
    let (mut budgets, (mut slot, seen)) = (unmeasured(signals_off()), Noting::slot(|_| true));
    add(&mut budgets, 1, ClientBudget { is_off: true, ..ClientBudget::default() });
    add(&mut budgets, 2, ClientBudget { rpdi_window: Some(8), ..ClientBudget::default() });
    orders(&mut budgets, &mut slot);
    for key in [1, 2] {
        budgets.generated(key, &[LINE; 8], 1.0);
    }
    assert_eq!(orders(&mut budgets, &mut slot), []);
    assert!(seen.lock().unwrap().is_empty());
}

#[test]
fn a_policy_that_weighs_signals_alone_is_not_asked_without_one() {
    for name in ["eat-rpdi", "fixed-budget", "patience", "noop"] {
        let (mut budgets, mut slot) = (unmeasured(signals_off()), slot(name, "{}"));
        add(&mut budgets, 1, ClientBudget::default());
        for _ in 0..40 {
            orders(&mut budgets, &mut slot);
            budgets.generated(1, &[LINE], 1.0);
        }
        let decisions: u64 = slot.control().status().decisions.iter().sum();
        assert_eq!(decisions, 1, "{name}: its thresholds");
    }
}

#[test]
fn a_load_that_grows_in_the_middle_of_a_thought_ends_it() {
    // `deadline-aware` allows a quarter of the limit when as many wait as think.
    let (mut budgets, mut slot) = (unmeasured(signals_off()), slot("deadline-aware", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[LINE; 16], 1.0);
    assert_eq!(orders(&mut budgets, &mut slot), [], "nobody waits");
    budgets.generated(1, &[LINE; 4], 1.0);
    let load = Load { thinking: 1, waiting: 1, ..Load::default() };
    let orders: Vec<_> = Order::read_all(budgets.decide(&mut slot, load)).collect();
    assert_eq!(orders, [Order::Limit { key: 1, from: 20, max_think_tokens: 0 }]);
}

#[test]
fn an_index_is_measured_for_a_policy_that_lists_it() {
    let measure = |on| Order::Measure { key: 1, on };
    let (mut budgets, (mut slot, seen)) = (budgets(signals_off(), 0), Noting::slot(|_| false));
    assert!(!add(&mut budgets, 1, ClientBudget::default()).limits.is_measured, "nobody was asked yet");
    assert_eq!(orders(&mut budgets, &mut slot), [measure(true)]);
    assert!(add(&mut budgets, 2, ClientBudget::default()).limits.is_measured);
    let feed = |budgets: &mut Followed, from: u32| {
        for token in from..from + 4 {
            let mut message = Vec::new();
            Report { key: 1, token, ahead: 0, what: Measured::Native, entropy_nats: 0.5, confidence: f32::NAN }
                .write(&mut message);
            budgets.received(&message);
            budgets.generated(1, &[if token == from + 3 { LINE } else { 20 }], 1.0);
        }
    };
    feed(&mut budgets, 0);
    assert_eq!(orders(&mut budgets, &mut slot), []);
    assert_eq!(*seen.lock().unwrap(), [[4.0, 2.0, 1.0]], "tokens, a boundary, and the index");
    // It is measured for as long as who decides reads it.
    let targets = MeridianConfig::default().scheduler.targets();
    let swapped = |name| Contender::new(native::policy::<Budget>(name, targets, "{}").unwrap(), "", "native");
    slot.control().swap(swapped("eat-rpdi"));
    let both = [measure(false), Order::Measure { key: 2, on: false }];
    assert_eq!(orders(&mut budgets, &mut slot), both, "RPDI is off, and nobody else looks at the index");
    slot.control().swap(swapped("deadline-aware"));
    let both = [measure(true), Order::Measure { key: 2, on: true }];
    assert_eq!(orders(&mut budgets, &mut slot), both);
}

#[test]
fn a_part_of_a_prompt_is_not_measured_whoever_decides() {
    let measure = |on| Order::Measure { key: 1, on };
    let (mut budgets, (mut slot, _)) = (budgets(signals_off(), 0), Noting::slot(|_| false));
    orders(&mut budgets, &mut slot);
    assert!(add(&mut budgets, 1, ClientBudget::default()).limits.is_measured);
    assert_eq!(budgets.chunks(1, true), [measure(false)]);
    assert_eq!(budgets.chunks(1, true), [], "the sampler knows");
    let targets = MeridianConfig::default().scheduler.targets();
    let swapped =
        |name| Contender::new(native::policy::<Budget>(name, targets, "{}").expect("it exists"), "", "native");
    slot.control().swap(swapped("eat-rpdi"));
    assert_eq!(orders(&mut budgets, &mut slot), [], "the index is not read, and its part is not measured anyway");
    assert_eq!(budgets.chunks(1, false), [], "it stays unmeasured");
    assert_eq!(budgets.chunks(1, true), []);
    slot.control().swap(swapped("deadline-aware"));
    assert_eq!(orders(&mut budgets, &mut slot), [], "not before the last part");
    assert_eq!(budgets.chunks(1, false), [measure(true)]);
}

/// On a device, the report of a step comes after its tokens, and after the plan of the next step.
#[test]
fn entropies_of_rejected_drafts_count_for_no_token() {
    let configured = Thresholds { rpdi_threshold: 1.5, eat_variance_threshold: 0.0, ..level() };
    // Steps of four rows; the last two drafts of each are rejected. From a token on, only their entropies are high.
    let report = |first: u32| {
        let mut message = Vec::new();
        for ahead in 0..4u8 {
            let entropy_nats = if ahead < 2 || first < 12 { 0.1 } else { 3.0 };
            let token = first + u32::from(ahead);
            Report { key: 1, token, ahead, what: Measured::Native, entropy_nats, confidence: f32::NAN }
                .write(&mut message);
        }
        message
    };
    for is_late in [true, false] {
        let (mut budgets, mut slot) = (budgets(configured, 0), slot("eat-rpdi", "{}"));
        add(&mut budgets, 1, ClientBudget::default());
        orders(&mut budgets, &mut slot);
        for first in (0..40).step_by(2) {
            if !is_late {
                budgets.received(&report(first));
            }
            budgets.generated(1, &[20, LINE], 1.0);
            if is_late {
                budgets.received(&report(first));
            }
            assert_eq!(orders(&mut budgets, &mut slot), [], "late {is_late}, {first}");
        }
    }
}

#[test]
fn only_infinity_turns_the_index_off() {
    for (rpdi_threshold, is_measured) in [(1e9, true), (1e300, true), (f64::INFINITY, false)] {
        let configured = Thresholds { rpdi_threshold, eat_variance_threshold: 0.0, ..level() };
        let (mut budgets, mut slot) = (budgets(configured, 0), slot("eat-rpdi", "{}"));
        assert_eq!(add(&mut budgets, 1, ClientBudget::default()).limits.is_measured, is_measured, "{rpdi_threshold:e}");
        assert_eq!(orders(&mut budgets, &mut slot), []);
    }
}

#[test]
fn a_boundary_that_is_still_to_be_measured_is_asked_about_once() {
    let configured = Thresholds { max_think_tokens: 1000, ..signals_off() };
    let (mut budgets, (mut slot, seen)) = (budgets(configured, 0), Noting::slot(|_| false));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20, 20, 20, LINE], 1.0);
    assert_eq!(orders(&mut budgets, &mut slot), []);
    assert!(seen.lock().unwrap().is_empty(), "its entropy is under way");
    let mut message = Vec::new();
    for token in 0..4 {
        let ahead = u8::try_from(token).expect("a few tokens");
        Report { key: 1, token, ahead, what: Measured::Native, entropy_nats: 0.5, confidence: f32::NAN }
            .write(&mut message);
    }
    budgets.received(&message);
    for _ in 0..2 {
        orders(&mut budgets, &mut slot);
        assert_eq!(*seen.lock().unwrap(), [[4.0, 2.0, 1.0]]);
    }
    // Nothing more is measured: after a while it is asked all the same.
    budgets.generated(1, &[LINE; 262], 1.0);
    orders(&mut budgets, &mut slot);
    assert_eq!(seen.lock().unwrap().len(), 2);
}

#[test]
fn an_end_below_the_minimum_comes_at_the_minimum() {
    let configured = Thresholds { min_think_tokens: 10, ..level() };
    let (mut budgets, mut slot) = (budgets(configured, 0), slot("eat-rpdi", "{}"));
    add(&mut budgets, 1, ClientBudget::default());
    orders(&mut budgets, &mut slot);
    budgets.generated(1, &[20, 21], 1.0);
    probe(&mut budgets, 1, 0.1, 3);
    assert_eq!(orders(&mut budgets, &mut slot), []);
    // No probe finds room any more: what was said holds.
    for _ in 3..=9 {
        budgets.generated(1, &[20], 1.0);
        assert_eq!(orders(&mut budgets, &mut slot), []);
    }
    budgets.generated(1, &[20], 1.0);
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 10, max_think_tokens: 0 }]);
}

/// A sampler may hear of an engine that was taken out, and a message may hold anything.
#[test]
fn reports_of_keys_that_are_not_these_budgets_change_nothing() {
    let first_key = 1 << 56;
    let mut budgets = Followed::new(ThinkSettings { epoch: 1, ..settings(level(), 0) });
    assert_eq!(add(&mut budgets, 1, ClientBudget::default()).key, first_key + 1);
    budgets.generated(1, &[20, 21], 1.0);
    assert_eq!(budgets.due().collect::<Vec<_>>(), [(first_key + 1, 2)]);
    budgets.probe_runs(first_key + 1, 3);
    for key in [0, 1, first_key, first_key + 2, 2 * first_key + 1, u64::MAX] {
        let mut message = Vec::new();
        Report { key, token: 2, ahead: 0, what: Measured::Probe, entropy_nats: 0.1, confidence: f32::NAN }
            .write(&mut message);
        budgets.received(&message);
        budgets.probed(key, Some(3));
    }
    assert_eq!((budgets.status().probes_done, budgets.status().probes_dropped), (0, 0));
    // Nobody is followed any more: what is heard of the old key is nobody's.
    ThinkBudgets::forget(&mut budgets.table);
    budgets.probed(first_key + 1, Some(3));
    assert_eq!(budgets.due().count(), 0);
}

#[test]
fn signals_are_kept_for_who_asks() {
    let mut budgets = budgets(level(), 0);
    budgets.record_signals(true);
    add(&mut budgets, 1, ClientBudget::default());
    budgets.generated(1, &[20, 21], 1.0);
    probe(&mut budgets, 1, std::f32::consts::LN_2, 3);
    let signals = budgets.take_signals();
    assert_eq!((signals.len(), signals[0].think_tokens, signals[0].answer), (1, 2, Some(3)));
    assert!((signals[0].bits.unwrap() - 1.0).abs() < 1e-6);
    assert!(budgets.take_signals().is_empty());
}
