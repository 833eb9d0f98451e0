//! Budgets as the thread that schedules drives them: what is measured, decided and ordered.

use meridian_core::budget::{EndRules, Load, Measured, Order, Report, Thresholds, Verdict};
use meridian_core::config::ProbeAt;
use meridian_core::{Budget, EntropyUnit, Markers, MeridianConfig, native};
use meridian_runtime::thinking::{ClientBudget, Enrolled, ThinkBudgets, ThinkSettings, Thinker};
use meridian_runtime::{BudgetSlot, Candidate};

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

fn budgets(configured: Thresholds, steps_ahead: u32) -> ThinkBudgets {
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("valid markers");
    ThinkBudgets::new(ThinkSettings {
        rules: EndRules::new(markers, vec![]).expect("an end marker"),
        configured,
        unit: EntropyUnit::Bits,
        measures: true,
        can_probe: true,
        probe_at: ProbeAt::Interval,
        block_tokens: 16,
        line_ends: [LINE].into(),
        boundaries: [LINE].into(),
        interrupts: [].into(),
        guards_eos: true,
        steps_ahead,
    })
}

fn add(budgets: &mut ThinkBudgets, key: u64, client: ClientBudget) -> Enrolled {
    let thinker = Thinker {
        id: &format!("r{key}"),
        prompt: &[1, 7],
        prompt_tokens: 2,
        max_tokens: 100,
        priority: 0,
        tenant: 0,
        deadline_ms: f64::INFINITY,
        client,
    };
    budgets.add(key, &thinker)
}

fn orders(budgets: &mut ThinkBudgets, slot: &mut BudgetSlot) -> Vec<Order> {
    Order::read_all(budgets.decide(slot, Load::default())).collect()
}

fn probe(budgets: &mut ThinkBudgets, key: u64, nats: f32, answer: u32) {
    let at = budgets.due().find(|(due, _)| *due == key).map_or(0, |(_, at)| at);
    budgets.probe_runs(key, 3);
    let mut datagram = Vec::new();
    Report { key, token: at, what: Measured::Probe, entropy_nats: nats }.write(&mut datagram);
    budgets.received(&datagram);
    budgets.probed(key, Some(answer));
}

#[test]
fn a_settled_probe_orders_the_end_at_the_next_token_that_is_not_under_way() {
    for steps_ahead in [0, 1] {
        let (mut budgets, mut slot) = (budgets(level(), steps_ahead), slot("eat-rpdi", "{}"));
        add(&mut budgets, 1, ClientBudget::default());
        assert_eq!(orders(&mut budgets, &mut slot), []);
        budgets.generated(1, &[20, 21], 1.0);
        assert_eq!(budgets.due().collect::<Vec<_>>(), [(1, 2)]);
        probe(&mut budgets, 1, 2.0, 3);
        assert_eq!(orders(&mut budgets, &mut slot), [], "not sure yet");
        budgets.generated(1, &[22, 23], 2.0);
        probe(&mut budgets, 1, 0.1, 3);
        let from = 4 + steps_ahead;
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from, max_think_tokens: 0 }]);
        assert_eq!(orders(&mut budgets, &mut slot), [], "said once");
        budgets.generated(1, &vec![24; steps_ahead as usize], 3.0);
        budgets.generated(1, &[8], 3.0);
        assert_eq!(budgets.status().forced, [0, 0, 1, 0, 0, 0], "EAT is the reason");
        assert_eq!((budgets.status().missed, budgets.status().probes_done), (0, 2));
        budgets.remove(1);
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Gone { key: 1 }]);
        assert_eq!((budgets.status().thought, budgets.status().think_tokens), (1, 5 + u64::from(steps_ahead)));
    }
}

#[test]
fn a_token_that_was_not_forced_is_counted_as_missed() {
    let mut budgets = budgets(Thresholds { max_think_tokens: 1, ..level() }, 0);
    add(&mut budgets, 1, ClientBudget::default());
    budgets.generated(1, &[20, 21], 1.0);
    assert_eq!((budgets.status().missed, budgets.status().forced[0]), (1, 1));
}

#[test]
fn a_client_may_have_less_or_its_own_thresholds_and_never_more() {
    let mut budgets = budgets(level(), 0);
    let limited =
        |max_think_tokens| ClientBudget { max_think_tokens: Some(max_think_tokens), ..ClientBudget::default() };
    assert_eq!(add(&mut budgets, 1, limited(9)).max_think_tokens, 9);
    assert_eq!(add(&mut budgets, 2, limited(900)).max_think_tokens, 50);
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
    let key = budgets.find("r1").unwrap();
    assert!(budgets.limit(key, 12) && !budgets.limit(99, 12));
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
    slot.control().swap(Candidate::new(fixed, "", "native:fixed-budget"));
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 3, max_think_tokens: 10 }]);
}

#[test]
fn entropies_that_a_policy_has_no_use_for_are_not_measured() {
    let (mut budgets, mut slot) =
        (budgets(Thresholds { rpdi_threshold: 2.0, ..level() }, 0), slot("fixed-budget", "{}"));
    assert!(add(&mut budgets, 1, ClientBudget::default()).is_measured);
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
    assert!(add(&mut budgets, 1, ClientBudget::default()).is_measured);
    orders(&mut budgets, &mut slot);
    for number in 0..12u32 {
        let mut datagram = Vec::new();
        let entropy_nats = if number < 8 { 0.1 } else { 3.0 };
        Report { key: 1, token: number, what: Measured::Native, entropy_nats }.write(&mut datagram);
        budgets.received(&datagram);
        budgets.generated(1, &[if number == 11 { LINE } else { 20 }], 1.0);
    }
    assert_eq!(budgets.due().count(), 0, "EAT is off");
    assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from: 12, max_think_tokens: 0 }]);
    budgets.generated(1, &[8], 1.0);
    assert_eq!(budgets.status().forced, [0, 0, 0, 1, 0, 0]);
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
            let mut datagram = Vec::new();
            let entropy_nats = if token < 8 { 0.1 } else { 3.0 };
            Report { key: 1, token, what: Measured::Native, entropy_nats }.write(&mut datagram);
            // Said twice, it counts once.
            budgets.received(&datagram);
            budgets.received(&datagram);
            if token == 11 {
                break;
            }
        }
        let from = 11 + late;
        assert_eq!(orders(&mut budgets, &mut slot), [Order::Limit { key: 1, from, max_think_tokens: 0 }]);
        budgets.generated(1, &[8], 1.0);
        assert_eq!(budgets.status().forced, [0, 0, 0, 1, 0, 0]);
    }
}

#[test]
fn a_probe_whose_entropy_comes_after_it_counts_until_the_next_is_due() {
    let report = |budgets: &mut ThinkBudgets, token| {
        let mut datagram = Vec::new();
        Report { key: 1, token, what: Measured::Probe, entropy_nats: 0.1 }.write(&mut datagram);
        budgets.received(&datagram);
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
