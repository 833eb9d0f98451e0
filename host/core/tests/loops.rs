//! Loops in thinking: where they end, for whom, and what a policy sees of repetitions.

use std::sync::{Arc, Mutex};

use meridian_core::budget::{
    BudgetWants, ClientBudget, EndRules, Load, Order, Point, ThinkBudgets, ThinkSettings, Thresholds, Verdict,
};
use meridian_core::slot::BudgetSlot;
use meridian_core::{
    Batch, Budget, BudgetColumn, BudgetDecision, Description, Fault, Markers, MeridianConfig, NewRequest, Policy,
    RequestTable, RowId, native,
};

const PERIOD: u32 = 30;
/// Tokens of a loop of that period, from its first to the one that makes it certain.
const CERTAIN: u32 = PERIOD + 1024;

struct Followed {
    budgets: ThinkBudgets,
    table: RequestTable,
    row: RowId,
}

impl Followed {
    fn new(ends_loops: bool, tokens_ahead: u32, client: ClientBudget) -> Self {
        let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).expect("valid markers").with_resuming(true);
        let rules = EndRules::new(markers.clone(), vec![]).expect("an end marker");
        let configured = Thresholds { min_think_tokens: 0, ..Thresholds::default() };
        let mut budgets =
            ThinkBudgets::new(ThinkSettings { configured, ends_loops, tokens_ahead, ..ThinkSettings::new(rules) });
        // As where another policy than the default decides.
        budgets.begins_to_decide(&BudgetWants { decides: true, ..BudgetWants::default() });
        let mut table = RequestTable::new(markers);
        let request = NewRequest { prompt: &[1, 7], max_tokens: 1 << 20, ..NewRequest::default() };
        let row = table.insert(&request).expect("finite times");
        budgets.enroll(&mut table, row, "r", client).expect("the row is live");
        Self { budgets, table, row }
    }

    fn token(&mut self, token: u32) {
        self.budgets.generated(&mut self.table, &[(self.row, token)], &mut Vec::new());
    }

    fn decide(&mut self, slot: &mut BudgetSlot) -> Vec<Order> {
        Order::read_all(self.budgets.decide(&mut self.table, slot, Load::default())).collect()
    }

    /// Think in a loop for so many tokens, and decide before each: the number of generated tokens at which thinking is
    /// ordered to end.
    fn end_of_loop(&mut self, slot: &mut BudgetSlot, tokens: u32) -> Option<u32> {
        (0..tokens).find_map(|number| {
            self.token(100 + number % PERIOD);
            let ends = self.decide(slot).into_iter();
            ends.filter_map(|order| if let Order::Limit { from, .. } = order { Some(from) } else { None }).next()
        })
    }
}

fn native(name: &str) -> BudgetSlot {
    let targets = MeridianConfig::default().scheduler.targets();
    BudgetSlot::new(native::policy::<Budget>(name, targets, "{}").expect("a native policy"), targets)
}

#[test]
fn a_certain_loop_ends_at_the_next_token_that_is_not_under_way() {
    for name in ["eat-rpdi", "patience", "noop"] {
        for tokens_ahead in [0, 1] {
            let mut slot = native(name);
            let mut followed = Followed::new(true, tokens_ahead, ClientBudget::default());
            assert!((0..700).all(|token| {
                followed.token(1000 + token);
                followed
                    .decide(&mut slot)
                    .iter()
                    .all(|order| matches!(order, Order::Limit { max_think_tokens: 1.., .. }))
            }));
            let from = 700 + CERTAIN + tokens_ahead;
            assert_eq!(followed.end_of_loop(&mut slot, 5000), Some(from), "{name}");
            for _ in 0..tokens_ahead {
                followed.token(50);
            }
            followed.token(8);
            assert_eq!(followed.budgets.status().forced, [0, 0, 0, 0, 0, 0, 1, 0], "{name}");
            assert_eq!(followed.budgets.status().missed, 0);
        }
    }
}

#[test]
fn a_loop_goes_on_where_none_is_to_be_ended() {
    let off = ClientBudget { is_off: true, ..ClientBudget::default() };
    for (ends_loops, client) in [(false, ClientBudget::default()), (true, off)] {
        let mut followed = Followed::new(ends_loops, 0, client);
        assert_eq!(followed.end_of_loop(&mut native("eat-rpdi"), 5000), None);
    }
}

#[test]
fn thinking_that_is_opened_again_repeats_nothing() {
    let mut followed = Followed::new(true, 0, ClientBudget::default());
    let mut slot = native("eat-rpdi");
    assert_eq!(followed.end_of_loop(&mut slot, CERTAIN - 1), None);
    [8, 90, 7].into_iter().for_each(|token| followed.token(token));
    assert_eq!(followed.end_of_loop(&mut slot, CERTAIN - 1), None);
    assert!(followed.end_of_loop(&mut slot, 5000).is_some());
}

/// Notes its columns, and ends thinking at so many repeated tokens.
struct Early {
    description: Description,
    inputs: Vec<BudgetColumn>,
    seen: Arc<Mutex<Vec<Vec<f32>>>>,
    ends_at: f32,
}

impl Early {
    fn slot(inputs: &[BudgetColumn], ends_at: f32) -> (BudgetSlot, Arc<Mutex<Vec<Vec<f32>>>>) {
        let seen = Arc::default();
        let policy = Self { description: Description::default(), inputs: inputs.to_vec(), seen, ends_at };
        let seen = Arc::clone(&policy.seen);
        (BudgetSlot::new(Box::new(policy), MeridianConfig::default().scheduler.targets()), seen)
    }
}

impl Policy<Budget> for Early {
    fn description(&self) -> &Description {
        &self.description
    }

    fn inputs(&self) -> &[BudgetColumn] {
        &self.inputs
    }

    fn decide(&mut self, batch: &Batch<'_, Budget>, decision: &mut BudgetDecision) -> Result<(), Fault> {
        if batch.facts.point == Point::Probe {
            self.seen.lock().expect("nobody panicked").push(batch.columns.to_vec());
            let is_over = batch.columns[0] >= self.ends_at;
            decision.verdicts = vec![if is_over { Verdict::EndNow } else { Verdict::KeepThinking }; batch.candidates];
        }
        Ok(())
    }

    fn recover(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}

#[test]
fn a_policy_that_reads_the_repetition_may_end_it_earlier() {
    let inputs = [BudgetColumn::Repetition, BudgetColumn::RepetitionPeriod, BudgetColumn::Signal];
    for ends_loops in [false, true] {
        let (mut slot, seen) = Early::slot(&inputs, 100.0);
        let mut followed = Followed::new(ends_loops, 0, ClientBudget::default());
        followed.decide(&mut slot);
        // Asked every 32 tokens, from the 24th repeated one on.
        assert_eq!(followed.end_of_loop(&mut slot, 5000), Some(PERIOD + 24 + 3 * 32));
        let seen = seen.lock().unwrap();
        assert_eq!(*seen, [24.0, 56.0, 88.0, 120.0].map(|tokens| vec![tokens, PERIOD as f32, 0.0]));
        followed.token(8);
        assert_eq!(followed.budgets.status().forced[1], 1, "the policy is the reason");
    }
}

#[test]
fn keeping_a_certain_loop_is_the_operators_choice() {
    let inputs = [BudgetColumn::Repetition];
    let end = |ends_loops| {
        let (mut slot, _) = Early::slot(&inputs, f32::INFINITY);
        Followed::new(ends_loops, 0, ClientBudget::default()).end_of_loop(&mut slot, 5000)
    };
    assert_eq!((end(true), end(false)), (Some(CERTAIN), None));
}

#[test]
fn a_policy_that_does_not_read_it_is_not_asked_about_it() {
    let (mut slot, seen) = Early::slot(&[BudgetColumn::ThinkTokens], f32::INFINITY);
    let mut followed = Followed::new(true, 0, ClientBudget::default());
    assert_eq!(followed.end_of_loop(&mut slot, 5000), Some(CERTAIN));
    assert!(seen.lock().unwrap().is_empty());
}
