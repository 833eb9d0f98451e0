//! Budgets of live requests, changed from other threads while steps go on.

use meridian_core::budget::{BudgetStatus, ClientBudget, EndRules, Enforcer, LiveChange, Order, SamplerLimits};
use meridian_core::{EngineFacts, Markers, MeridianConfig, NewRequest, RowId};
use meridian_engine::budgets::{ChangeError, ChangeReport};
use meridian_engine::{Engine, Settings, ThinkTokens};

const OPEN: u32 = 7;
const END: u32 = 8;
const TABLE: &str = "[scheduler]\nmin_think_tokens = 0\nmax_think_tokens = 100\n[telemetry]\nprometheus = ''\n[admin]\n\
                     listen = ''\n";

/// An engine with requests, and the sampler of each.
struct Serving {
    engine: Engine,
    rows: Vec<(RowId, Enforcer, Vec<u32>)>,
    rules: EndRules,
    keys: Vec<u64>,
}

impl Serving {
    fn start(config: &str, steps_ahead: usize) -> Self {
        let markers = Markers::new(vec![vec![OPEN]], vec![vec![END]], vec![]).unwrap();
        let settings = Settings { markers: markers.clone(), steps_ahead, ..Settings::default() };
        let engine = Engine::start(MeridianConfig::from_toml(config).unwrap(), settings).unwrap();
        let forced = ThinkTokens { forced: vec![END], ..ThinkTokens::default() };
        engine.drive().follow_thinking(forced, false).unwrap();
        Self { engine, rows: Vec::new(), rules: EndRules::new(markers, vec![END]).unwrap(), keys: Vec::new() }
    }

    fn arrive(&mut self, id: &str, tenant: &str, client: ClientBudget) {
        let request = NewRequest { prompt: &[1, OPEN], max_tokens: 1000, tenant, ..NewRequest::default() };
        let arrived = self.engine.drive().arrived(id, &request, Some(client)).unwrap();
        let enrolled = arrived.sampler.unwrap();
        let most = enrolled.limits.max_think_tokens;
        let limits = SamplerLimits { max_think_tokens: most, ..SamplerLimits::default() };
        self.rows.push((arrived.row, Enforcer::new(&self.rules, &[1, OPEN], limits), Vec::new()));
        self.keys.push(enrolled.key);
    }

    /// Orders, then a token of each request.
    fn step(&mut self) {
        let mut driver = self.engine.drive();
        let orders = driver.judge_thinking(0.0, 0, 0).to_vec();
        for order in Order::read_all(&orders) {
            if let Order::Limit { key, from, max_think_tokens } = order {
                let at = self.keys.iter().position(|known| *known == key).unwrap();
                self.rows[at].1.limit_from(from, max_think_tokens);
            }
        }
        let rows: Vec<RowId> = self.rows.iter().map(|(row, ..)| *row).collect();
        let facts = EngineFacts { token_budget: 64, free_seats: 8, decode_tokens: 1, ..EngineFacts::default() };
        if self.rows[0].2.is_empty() {
            driver.plan(&facts, &[], &rows);
            rows.iter().for_each(|row| driver.admitted(*row, 0));
        } else {
            driver.plan(&facts, &rows, &[]);
        }
        driver.scheduled(0.0, &rows.iter().map(|row| (*row, 1)).collect::<Vec<_>>(), 0);
        for (row, enforcer, tokens) in &mut self.rows {
            let token = match enforcer.demand(&self.rules) {
                meridian_core::budget::Demand::Force(token) => token,
                _ => 40,
            };
            enforcer.push(&self.rules, token);
            tokens.push(token);
            driver.generated(&[(*row, token)]);
        }
    }

    fn steps(&mut self, count: usize) {
        (0..count).for_each(|_| self.step());
    }

    fn change(&self, text: &str) -> Result<ChangeReport, ChangeError> {
        let change = LiveChange::from_json(text.as_bytes()).unwrap();
        self.engine.drive().change_budgets(&change)
    }

    /// Where each request's thinking ended.
    fn ends(&self) -> Vec<Option<usize>> {
        self.rows.iter().map(|(.., tokens)| tokens.iter().position(|token| *token == END)).collect()
    }

    fn status(&self) -> BudgetStatus {
        self.engine.drive().thinking_status().unwrap()
    }
}

#[test]
fn a_change_ends_thinking_at_the_token_that_it_names() {
    for named in [0, 3, 9, 10, 11, 12, 40] {
        let mut serving = Serving::start(TABLE, 0);
        serving.arrive("chatcmpl-1-0123abcd", "", ClientBudget::default());
        serving.steps(10);
        let report = serving.change(&format!(r#"{{"request": "chatcmpl-1", "max_think_tokens": {named}}}"#)).unwrap();
        assert_eq!((report.changed, report.requests[0].max_think_tokens), (1, named));
        assert_eq!(report.requests[0].think_tokens, 10);
        serving.steps(50);
        assert_eq!(serving.ends(), [Some(named.max(10) as usize)], "{named}");
        assert_eq!(serving.status().missed, 0);
    }
}

#[test]
fn a_limit_may_be_raised_again_up_to_the_operators() {
    let mut serving = Serving::start(TABLE, 0);
    let client = ClientBudget { max_think_tokens: Some(20), ..ClientBudget::default() };
    for id in ["a", "b", "c"] {
        serving.arrive(id, "", client.clone());
    }
    serving.steps(5);
    serving.change(r#"{"request": "a", "max_think_tokens": 60}"#).unwrap();
    serving.change(r#"{"request": "b", "max_think_tokens": 5000}"#).unwrap();
    serving.change(r#"{"request": "c", "max_think_tokens": 60}"#).unwrap();
    serving.steps(5);
    serving.change(r#"{"request": "c", "reset": true}"#).unwrap();
    serving.steps(110);
    assert_eq!(serving.ends(), [Some(60), Some(100), Some(20)]);
    assert_eq!(serving.status().missed, 0);
}

#[test]
fn a_change_reaches_a_tenant_or_all_that_live_and_no_later_request() {
    let mut serving = Serving::start(TABLE, 0);
    for (id, tenant) in [("a", "one"), ("b", "two"), ("c", "one"), ("d", "")] {
        serving.arrive(id, tenant, ClientBudget::default());
    }
    serving.steps(4);
    let report = serving.change(r#"{"tenant": "one", "end_now": true}"#).unwrap();
    assert_eq!(report.changed, 2);
    assert!(report.requests.iter().all(|request| request.tenant == "one"));
    serving.steps(2);
    let report = serving.change(r#"{"all": true, "max_think_tokens": 30}"#).unwrap();
    assert_eq!((report.changed, report.answering), (2, 2));
    serving.arrive("e", "one", ClientBudget::default());
    serving.steps(120);
    assert_eq!(serving.ends(), [Some(4), Some(30), Some(4), Some(30), Some(100)]);
    let list = serving.engine.drive().live_budgets().unwrap();
    assert_eq!(list.live, 5);
    assert!(list.requests.iter().all(|request| request.ends_by.as_deref() == Some("hard-cap")));
}

#[test]
fn a_step_in_flight_is_not_contradicted() {
    // The scheduler knows of a token only after the next one is under way.
    let mut serving = Serving::start(TABLE, 1);
    serving.arrive("a", "", ClientBudget::default());
    serving.steps(6);
    serving.change(r#"{"request": "a", "end_now": true}"#).unwrap();
    serving.steps(6);
    assert_eq!(serving.ends(), [Some(7)], "one token is under way");
    assert_eq!(serving.status().missed, 0);
}

#[test]
fn what_cannot_be_changed_is_named() {
    let mut serving = Serving::start(TABLE, 0);
    for id in ["chatcmpl-1-0123abcd", "chatcmpl-12-0123abcd", "0_cmpl-3-0123abcd", "1_cmpl-3-0123abce"] {
        serving.arrive(id, "", ClientBudget::default());
    }
    serving.steps(3);
    let refused = |text: &str| serving.change(text).unwrap_err().to_string();
    assert_eq!(refused(r#"{"request": "x", "reset": true}"#), "x: no live request has this id");
    let several = refused(r#"{"request": "chatcmpl", "reset": true}"#);
    assert!(several.starts_with("chatcmpl: 2 requests have this in their id: chatcmpl-1"), "{several}");
    assert_eq!(refused(r#"{"tenant": "t", "end_now": true}"#), "t: this tenant has no live request");
    assert_eq!(serving.change(r#"{"request": "chatcmpl-1", "reset": true}"#).unwrap().changed, 1);
    assert_eq!(serving.change(r#"{"request": "cmpl-3", "end_now": true}"#).unwrap().changed, 2, "both its answers");
    serving.steps(3);
    let over = serving.change(r#"{"request": "cmpl-3", "max_think_tokens": 50}"#).unwrap_err();
    assert!(matches!(&over, ChangeError::NothingToChange(why) if why.contains("2 answer already")), "{over}");
    let none = Engine::start(MeridianConfig::from_toml(TABLE).unwrap(), Settings::default()).unwrap();
    let why = none.drive().live_budgets().unwrap_err().to_string();
    assert!(why.starts_with("this engine ends no thinking"), "{why}");
}

#[test]
fn another_threads_change_is_made_by_the_next_step_or_without_one() {
    let mut serving = Serving::start(TABLE, 0);
    serving.arrive("a", "", ClientBudget::default());
    serving.steps(3);
    let change = |most: u32| LiveChange { all: true, max_think_tokens: Some(most), ..LiveChange::default() };
    // No step begins.
    let report = serving.engine.control().budgets().unwrap().change(change(50)).unwrap();
    assert_eq!(report.requests[0].max_think_tokens, 50);
    // Steps go on while another thread asks.
    let control = |engine: &Engine| engine.control().budgets().unwrap().change(change(20));
    std::thread::scope(|scope| {
        let asked = scope.spawn({
            let engine = &serving.engine;
            move || control(engine)
        });
        while !asked.is_finished() {
            serving.engine.drive().judge_thinking(0.0, 0, 0);
        }
        assert_eq!(asked.join().unwrap().unwrap().changed, 1);
    });
    // The order of the change may have gone to nobody above: it is what the next change repeats.
    serving.change(r#"{"all": true, "max_think_tokens": 21}"#).unwrap();
    serving.steps(40);
    assert_eq!(serving.ends(), [Some(21)]);
}

#[test]
fn bad_changes_name_the_field_the_value_and_what_was_expected() {
    for (text, error) in [
        ("{}", "request, tenant, all: 0 given: must be exactly one of them"),
        (
            r#"{"all": true, "tenant": "a", "reset": true}"#,
            "request, tenant, all: 2 given: must be exactly one of them",
        ),
        (r#"{"all": true}"#, "change: nothing: must be a threshold, end_now or reset"),
        (r#"{"request": "", "reset": true}"#, "request: 0 bytes: must have 1 to 1024 bytes"),
        (r#"{"all": true, "max_think_tokens": 16777217}"#, "max_think_tokens: 16777217: must be in 0..=16777216"),
        (
            r#"{"all": true, "end_now": true, "max_think_tokens": 1}"#,
            "end_now: true: must be without max_think_tokens, which it sets to 0",
        ),
        (
            r#"{"all": true, "max_think_tokens": 4, "min_think_tokens": 5}"#,
            "min_think_tokens: 5: must be at most max_think_tokens",
        ),
        (r#"{"all": true, "rpdi_window": 0}"#, "rpdi_window: 0: must be in 1..=65536"),
        (r#"{"all": true, "eat_max_bits": -1}"#, "eat_max_bits: -1: must be at least 0"),
        (r#"{"all": true, "eat_probe_interval_tokens": 0}"#, "eat_probe_interval_tokens: 0: must be at least 1"),
    ] {
        assert_eq!(LiveChange::from_json(text.as_bytes()).unwrap_err().to_string(), error, "{text}");
    }
    for (text, starts) in [
        (r#"{"all": true, "max_tokens": 5}"#, "max_tokens: unknown field `max_tokens`, expected one of"),
        (
            r#"{"all": true, "max_think_tokens": "many"}"#,
            "max_think_tokens: invalid type: string \"many\", expected u32",
        ),
        (r#"{"all": true, "max_think_tokens": -1}"#, "max_think_tokens: invalid value: integer `-1`, expected u32"),
        ("[", "the body: "),
        (r#"{"all": true, "reset": true} x"#, "the body: trailing characters"),
    ] {
        let error = LiveChange::from_json(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with(starts), "{text}: {error}");
    }
}
