//! Service levels: which request has which, the time that is left to keep it, and the wait that the host guards.

use meridian_core::config::ServiceLevels;
use meridian_core::slot::{DispatchSlot, EvictionSlot};
use meridian_core::{
    Column, Decision, EngineFacts, EngineMirror, Markers, Memory, MeridianConfig, MeridianScheduler, NewRequest, Plan,
    Planner, Queues, RequestTable, RowId, SchedulerConfig, State, Subject, TableStep, WAITING_WINDOW, columns, native,
};
use proptest::prelude::*;

fn levels(text: &str) -> ServiceLevels {
    MeridianConfig::from_toml(text).expect("valid").service_levels
}

fn column(table: &RequestTable, row: RowId, column: Column, now_ms: f64) -> f32 {
    let mut out = Vec::new();
    columns::fill(&[column], table, &[row], now_ms, 16, &mut out);
    out[0]
}

#[test]
fn a_claim_goes_before_the_tenant_then_the_model_the_priority_and_the_default() {
    let mut table = RequestTable::default();
    table.promise(&levels(
        "[service_levels]
        a = { claimable = true }
        b = { tenants = ['web'] }
        c = { models = ['adapter'] }
        d = { priorities = [-4, -1] }
        e = { default = true, weight = 3.0 }",
    ));
    let web = NewRequest { tenant: "web", model: "adapter", priority: -2, ..NewRequest::default() };
    let mut of = |request: NewRequest<'_>| {
        let row = table.insert(&request).expect("finite times");
        column(&table, row, Column::Level, 0.0)
    };
    assert_eq!(of(NewRequest { service_level: "a", ..web }), 1.0);
    assert_eq!(of(NewRequest { service_level: "b", tenant: "", ..web }), 3.0, "b is not claimable");
    assert_eq!(of(web), 2.0);
    assert_eq!(of(NewRequest { tenant: "", ..web }), 3.0);
    assert_eq!(of(NewRequest { tenant: "", model: "", ..web }), 4.0);
    assert_eq!(of(NewRequest::default()), 5.0);
    let row = table.insert(&NewRequest::default()).expect("finite times");
    assert_eq!(column(&table, row, Column::LevelWeight, 0.0), 3.0);
}

#[test]
fn without_a_level_nothing_is_promised() {
    let mut table = RequestTable::default();
    let row = table.insert(&NewRequest { service_level: "a", tenant: "web", ..NewRequest::default() }).expect("finite");
    let of = |of: Column| column(&table, row, of, 1e9);
    assert_eq!([Column::Level, Column::LevelWeight].map(of), [0.0, 1.0]);
    assert_eq!([Column::LevelSlackMs, Column::LevelTpotMs].map(of), [f32::INFINITY; 2]);
}

const THINK: u32 = 7;
const END: u32 = 8;

/// An engine whose decode-only steps take 10 ms, and 0.1 ms for a token of a prompt, after some steps.
fn learned(text: &str) -> EngineMirror {
    let mut mirror = EngineMirror::new(Markers::new(vec![vec![THINK]], vec![vec![END]], vec![]).expect("markers"));
    mirror.table.promise(&levels(text));
    let mut add = |prompt_tokens: u32| {
        let new = NewRequest { prompt: &[1, THINK], prompt_tokens, ..NewRequest::default() };
        let row = mirror.table.insert(&new).expect("finite times");
        mirror.admitted(row, 0);
        row
    };
    let (decodes, prompt) = (add(2), add(1 << 20));
    let mut now_ms = 0.0;
    for step in 0..100u32 {
        let tokens = if step % 4 == 0 { 100 } else { 0 };
        let facts = EngineFacts {
            now_ms: mirror.hold_time(now_ms),
            token_budget: 2048,
            decode_tokens: 1,
            ..Default::default()
        };
        mirror.begin_step(&facts, &[decodes, prompt], &[]);
        mirror.scheduled(now_ms, [(decodes, if step == 0 { 2 } else { 1 }), (prompt, tokens)]);
        now_ms += 10.0 + 0.1 * f64::from(tokens);
        mirror.hold_time(now_ms);
        mirror.table.generated(decodes, &[5], &mut Vec::new());
    }
    mirror.table.remove(prompt);
    let facts = EngineFacts { now_ms, token_budget: 2048, decode_tokens: 1, ..Default::default() };
    mirror.begin_step(&facts, &[decodes], &[]);
    mirror
}

#[test]
fn the_slack_is_what_the_level_allows_less_what_the_request_needs() {
    let text = "[service_levels.a]\nttfo_ms = 5000\nprompt_ms_per_token = 0.5\nthink_ms_per_token = 50\ndefault = true";
    let mut mirror = learned(text);
    let now_ms = mirror.now_ms();
    let mut new = |prompt_tokens: u32| {
        let new = NewRequest { prompt: &[1, THINK], prompt_tokens, arrival_ms: now_ms, ..NewRequest::default() };
        mirror.table.insert(&new).expect("finite times")
    };
    let (short, long) = (new(2), new(10_002));
    let slack_ms = |row, now_ms| column(&mirror.table, row, Column::LevelSlackMs, now_ms);
    let left = column(&mirror.table, short, Column::ThinkLeft, now_ms);
    let expected = 5000.0 + 0.75 * 40.0 * left - 10.0;
    assert!((slack_ms(short, now_ms) / expected - 1.0).abs() < 0.05, "{} {expected}", slack_ms(short, now_ms));
    // 10,000 tokens: 5 s more are allowed, and they take 1 s alone, twice as long beside others.
    let more = slack_ms(long, now_ms) - slack_ms(short, now_ms);
    assert!((more / 3000.0 - 1.0).abs() < 0.05, "{more}");
    assert!((slack_ms(short, now_ms) - slack_ms(short, now_ms + 700.0) - 700.0).abs() < 1.0);
    assert!(slack_ms(short, now_ms + 1e6) < -9e5);
}

#[test]
fn a_request_that_keeps_its_place_has_no_slack_to_lose() {
    let mirror = learned("[service_levels.a]\nlate = 'serve'\ndefault = true");
    let rows: Vec<RowId> = mirror.table.iter().map(meridian_core::RequestState::row_id).collect();
    assert_eq!(column(&mirror.table, rows[0], Column::LevelSlackMs, 1e9), f32::INFINITY);
}

/// One step of a small engine that gives its only free seat to whomever the plan puts first.
fn step(table: &mut RequestTable, planner: &mut Planner, queues: &mut Queues, now_ms: f64, decision: &Decision) {
    table.set_clock(now_ms);
    let facts = EngineFacts { now_ms, token_budget: 64, free_seats: 1, decode_tokens: 1, ..EngineFacts::default() };
    let plan = planner.plan(table, &facts, &queues.running, queues.waiting.make_contiguous(), decision, 20.0).clone();
    let mut step = TableStep::new(table, 1);
    let tokens = queues.carry_out(&plan, 1, &mut step);
    let TableStep { admitted, given, .. } = step;
    admitted.into_iter().for_each(|row| table.admitted(row, 0));
    given.into_iter().for_each(|(row, tokens)| table.scheduled(row, tokens, now_ms));
    planner.settle(table, tokens, now_ms);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn being_passed_over_for_a_promise_ends_with_the_longest_wait(longest_wait_ms in 100u32..2000) {
        let (mut table, mut planner, mut queues) = (RequestTable::default(), Planner::default(), Queues::default());
        table.promise(&levels(&format!(
            "[service_levels.a]\nttfo_ms = 50\nlongest_wait_ms = {longest_wait_ms}\ndefault = true"
        )));
        let arrive = |table: &mut RequestTable, queues: &mut Queues, now_ms: f64| {
            let row = table.insert(&NewRequest { prompt_tokens: 4, arrival_ms: now_ms, ..NewRequest::default() });
            queues.waiting.push_back(row.expect("finite times"));
            *queues.waiting.back().expect("it was added")
        };
        let late = arrive(&mut table, &mut queues, 0.0);
        let mut now_ms = 0.0;
        while table[late].state() != State::Running {
            for row in queues.running.drain(..) {
                table.remove(row);
            }
            now_ms += 1.0;
            arrive(&mut table, &mut queues, now_ms);
            // More than four times as many pass it as stood before it.
            let keys = queues.waiting.iter().map(|row| f32::from(u8::from(*row == late))).collect();
            step(&mut table, &mut planner, &mut queues, now_ms, &Decision { keys, ..Decision::default() });
            prop_assert!(now_ms < 3000.0, "it was never served");
        }
        prop_assert!((now_ms - f64::from(longest_wait_ms)).abs() <= 3.0, "{} of {}", now_ms, longest_wait_ms);
    }
}

#[test]
fn who_is_late_is_preempted_first() {
    let mut mirror = learned(
        "[service_levels.a]\npriorities = [1, 1]\n[service_levels.b]\nttfo_ms = 1\nthink_ms_per_token = 0\npriorities = [2, 2]",
    );
    let now_ms = mirror.now_ms();
    let mut add = |priority: i32, prompt_tokens: u32| {
        let new =
            NewRequest { prompt: &[1, THINK], prompt_tokens, arrival_ms: now_ms, priority, ..NewRequest::default() };
        let row = mirror.table.insert(&new).expect("finite times");
        mirror.admitted(row, 0);
        mirror.scheduled(now_ms, [(row, prompt_tokens)]);
        row
    };
    let running = [add(1, 16), add(2, 400), add(0, 32)];
    let memory = Memory { now_ms, subject: Subject::Requests, free_blocks: 0, cached_blocks: 0, total_blocks: 100 };
    let mut slot = EvictionSlot::new(
        native::default_policy(SchedulerConfig::default().targets()),
        SchedulerConfig::default().targets(),
    );
    assert_eq!(mirror.victim(&mut slot, &memory, &running, &[]), Some(1), "it has computed most, and is late");
}

#[test]
fn who_cannot_be_in_time_is_refused_before_it_is_admitted_while_others_run() {
    let text = "[service_levels.a]\nttfo_ms = 100\nthink_ms_per_token = 0\nlate = 'refuse'\ntenants = ['a']
        [service_levels.b]\nttfo_ms = 100\nthink_ms_per_token = 0\ndefault = true";
    let config = SchedulerConfig::default();
    let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
    let mut scheduler = MeridianScheduler::for_engine(slot, Markers::default(), &config, 16);
    scheduler.promise(&levels(text));
    let add = |scheduler: &mut MeridianScheduler, tenant: &str| {
        let new = NewRequest { tenant, prompt_tokens: 16, ..NewRequest::default() };
        scheduler.mirror().table.insert(&new).expect("finite times")
    };
    let rows = ["a", "a", "b"].map(|tenant| add(&mut scheduler, tenant));
    let refused = |scheduler: &mut MeridianScheduler, now_ms: f64, running: &[RowId], waiting: &[RowId]| {
        let facts = EngineFacts { now_ms, token_budget: 64, decode_tokens: 1, ..EngineFacts::default() };
        scheduler.plan(&facts, running, waiting).refused.clone()
    };
    assert_eq!(refused(&mut scheduler, 500.0, &[], &rows), [], "nobody is in its way");
    scheduler.mirror().admitted(rows[0], 0);
    scheduler.scheduled(500.0, [(rows[0], 16)]);
    let late = add(&mut scheduler, "a");
    let [running, waiting] = [&rows[..1], &[rows[1], rows[2], late]];
    let mut found = refused(&mut scheduler, 510.0, running, waiting);
    found.sort();
    assert_eq!(found, [rows[1], late], "of b, late requests go last");
    scheduler.mirror().table.remove(late);
    // The engine may be unable to end it now.
    assert_eq!(refused(&mut scheduler, 520.0, running, &waiting[..2]), [rows[1]]);
    scheduler.mirror().table.remove(rows[1]);
    assert_eq!(refused(&mut scheduler, 1e6, running, &waiting[1..2]), []);
    scheduler.mirror().preempted(rows[0]);
    assert_eq!(refused(&mut scheduler, 2e6, &rows[2..], &rows[..1]), [], "it was admitted once");
    let counts = scheduler.mirror().table.level_counts();
    assert_eq!((counts[0].refused, counts[0].ended), (2, [0, 0]));
}

#[test]
fn a_step_looks_at_a_part_of_those_who_wait_and_at_all_in_turn() {
    let config = SchedulerConfig::default();
    let slot = DispatchSlot::new(native::default_policy(config.targets()), config.targets());
    let mut scheduler = MeridianScheduler::for_engine(slot, Markers::default(), &config, 16);
    scheduler
        .promise(&levels("[service_levels.a]\nttfo_ms = 100\nthink_ms_per_token = 0\nlate = 'refuse'\ndefault = true"));
    let mut add = || scheduler.mirror().table.insert(&NewRequest::default()).expect("finite times");
    let running = add();
    let mut waiting: Vec<RowId> = std::iter::repeat_with(add).take(1000).collect();
    scheduler.mirror().admitted(running, 0);
    let mut steps = 0;
    while !waiting.is_empty() {
        let facts = EngineFacts { now_ms: 1e4, token_budget: 64, decode_tokens: 1, ..EngineFacts::default() };
        let refused = scheduler.plan(&facts, &[running], &waiting).refused.clone();
        assert!(refused.len() <= 256, "{}", refused.len());
        for row in refused {
            scheduler.mirror().table.remove(row);
            waiting.retain(|other| *other != row);
        }
        steps += 1;
        assert!(steps <= 4, "{} wait", waiting.len());
    }
}

#[test]
fn a_level_gets_its_least_share_whatever_the_policy_says_and_no_more() {
    for (share, has_keys) in [(0.2, true), (0.5, true), (0.2, false)] {
        let (mut table, mut planner, mut queues) = (RequestTable::default(), Planner::default(), Queues::default());
        table.promise(&levels(&format!(
            "[service_levels.batch]\nleast_share = {share}\ntenants = ['batch']\n[service_levels.chat]\ndefault = true"
        )));
        let mut served = [0.0f64; 2];
        for at in 0..2000 {
            let now_ms = f64::from(at) * 20.0;
            for row in queues.running.drain(..) {
                table.remove(row);
            }
            // Chat always comes, and stands first; one of batch waits.
            for tenant in ["chat", "batch"] {
                let is_missing = tenant == "chat" || !queues.waiting.iter().any(|row| table[*row].tenant() == 2);
                if is_missing {
                    let new = NewRequest { tenant, prompt_tokens: 4, arrival_ms: now_ms, ..NewRequest::default() };
                    let row = table.insert(&new).expect("finite times");
                    if tenant == "chat" { queues.waiting.push_front(row) } else { queues.waiting.push_back(row) }
                }
            }
            let is_batch = |row: &RowId| table[*row].tenant() == 2;
            let keys: Vec<f32> = queues.waiting.iter().map(|row| f32::from(u8::from(is_batch(row)))).collect();
            let keys = if has_keys { keys } else { Vec::new() };
            step(&mut table, &mut planner, &mut queues, now_ms, &Decision { keys, ..Decision::default() });
            for row in &queues.running {
                served[usize::from(table[*row].tenant() == 2)] += 1.0;
            }
        }
        let found = served[1] / (served[0] + served[1]);
        assert!((found - share).abs() < 0.05, "{found}, expected {share}");
    }
}

#[test]
fn shares_of_more_than_all_are_refused() {
    let text = "[service_levels.a]\nleast_share = 0.6\n[service_levels.b]\nleast_share = 0.5";
    let error = MeridianConfig::from_toml(text).expect_err("more than all").to_string();
    assert_eq!(error, "service_levels.b.least_share: 0.5: must be at most 1 for all levels together");
}

#[test]
fn a_window_has_the_oldest_and_the_newest_who_wait() {
    let mut table = RequestTable::default();
    let mut add = || table.insert(&NewRequest::default()).expect("finite times");
    let rows: Vec<RowId> = std::iter::repeat_with(&mut add).take(WAITING_WINDOW + 1000).collect();
    let mut queues = Queues::default();
    queues.waiting.extend(&rows);
    queues.gather(3);
    let half = WAITING_WINDOW / 2;
    let seen: Vec<RowId> = queues.waiting.iter().take(WAITING_WINDOW).copied().collect();
    assert_eq!(seen, [&rows[..half], &rows[rows.len() - half..]].concat());
    let mut kept = queues.clone();
    kept.arrange(&Plan::default());
    assert_eq!(kept.waiting, rows);
    // The newest first: those who may be admitted pass the oldest, who stay before all others.
    let waiting_order = (0..WAITING_WINDOW as u32).rev().collect();
    queues.arrange(&Plan { waiting_order, ..Plan::default() });
    let mut sorted: Vec<RowId> = queues.waiting.iter().copied().collect();
    assert_eq!(sorted[..3], [rows[rows.len() - 1], rows[rows.len() - 2], rows[rows.len() - 3]]);
    assert_eq!(sorted[3..3 + half], rows[..half].iter().rev().copied().collect::<Vec<_>>());
    assert_eq!(sorted[3 + half..3 + half + 1000], rows[half..half + 1000]);
    sorted.sort();
    assert_eq!(sorted, rows, "nobody is lost");
}
