//! Where thinking ends when it is made to: at the exact token, whatever is sampled, replayed or told late.

use meridian_core::budget::{Demand, EndRules, Enforcer, ForceReason, Order, Report, SamplerLimits};
use meridian_core::{Error, Markers, Pattern};
use proptest::prelude::*;

const START: u32 = 7;
const GUARDED: [u32; 2] = [8, 9];

/// A model whose end marker has two tokens, with a phrase before it and a line break behind.
fn rules() -> EndRules {
    let markers = Markers::new(vec![vec![START]], vec![GUARDED.to_vec()], vec![3]).expect("valid markers");
    EndRules::new(markers, vec![40, 41, 8, 9, 3]).expect("an end marker")
}

fn thinking(limits: SamplerLimits) -> Enforcer {
    Enforcer::new(&rules(), &[1, START], limits)
}

/// Samples until the thinking is over: what is demanded, else the next of `wished`.
fn run(enforcer: &mut Enforcer, wished: &mut impl Iterator<Item = u32>, tokens: usize) -> Vec<u32> {
    let rules = rules();
    let mut out = Vec::new();
    while out.len() < tokens {
        let token = match enforcer.demand(&rules) {
            Demand::Force(token) => token,
            Demand::Free | Demand::Guarded | Demand::Answer(_) => wished.next().expect("enough tokens"),
        };
        enforcer.push(&rules, token);
        out.push(token);
    }
    out
}

#[test]
fn the_hard_cap_is_exact_and_the_whole_ending_follows() {
    for cap in [0, 1, 5] {
        let mut request = thinking(SamplerLimits { max_think_tokens: cap, ..SamplerLimits::default() });
        let out = run(&mut request, &mut (20..), cap as usize + 7);
        let at = cap as usize;
        assert_eq!(out[at..at + 5], [40, 41, 8, 9, 3], "cap {cap}");
        assert_eq!(request.forced(), Some((cap, ForceReason::HardCap)));
        assert!(!request.is_thinking());
    }
}

#[test]
fn a_model_that_ends_by_itself_is_left_alone() {
    let mut request = thinking(SamplerLimits { max_think_tokens: 10, ..SamplerLimits::default() });
    let out = run(&mut request, &mut [20, 21, 8, 9, 22, 23].into_iter(), 6);
    assert_eq!(out, [20, 21, 8, 9, 22, 23]);
    assert_eq!(request.forced(), None);
}

#[test]
fn tokens_of_the_start_marker_are_not_thought() {
    let rules = rules();
    // The prompt leaves it open whether the model thinks.
    let mut request = Enforcer::new(&rules, &[1, 2], SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() });
    assert_eq!(request.demand(&rules), Demand::Free);
    request.push(&rules, START);
    assert_eq!((request.think_tokens(), request.demand(&rules)), (0, Demand::Guarded));
    request.push(&rules, 20);
    assert_eq!(request.demand(&rules), Demand::Force(40));
}

/// A model with tool calls, without a phrase.
fn calling(ends_thinking: bool) -> EndRules {
    let markers = Markers::new(vec![vec![START]], vec![vec![8]], vec![]).expect("valid markers");
    let markers = markers.with_calls(vec![(vec![50], vec![51])], ends_thinking).expect("valid markers");
    EndRules::new(markers, vec![]).expect("an end marker")
}

#[test]
fn an_end_waits_until_a_tool_call_has_closed() {
    let rules = calling(false);
    let limits = SamplerLimits { max_think_tokens: 2, guards_eos: true, ..SamplerLimits::default() };
    let mut request = Enforcer::new(&rules, &[1, START], limits);
    for (token, demand) in [(30, Demand::Guarded), (50, Demand::Guarded), (31, Demand::Free), (32, Demand::Free)] {
        assert_eq!(request.demand(&rules), demand, "{token}");
        request.push(&rules, token);
    }
    assert_eq!(request.demand(&rules), Demand::Free, "in the call, where the turn may end");
    request.push(&rules, 51);
    assert_eq!(request.demand(&rules), Demand::Force(8));
    request.push(&rules, 8);
    assert_eq!(request.forced(), Some((5, ForceReason::HardCap)));
}

#[test]
fn a_tool_call_that_ends_thinking_leaves_nothing_to_force() {
    let rules = calling(true);
    let mut request =
        Enforcer::new(&rules, &[1, START], SamplerLimits { max_think_tokens: 2, ..SamplerLimits::default() });
    for token in [30, 50, 31, 32, 51, 33] {
        assert!(!matches!(request.demand(&rules), Demand::Force(_)), "{token}");
        request.push(&rules, token);
    }
    assert_eq!((request.is_thinking(), request.forced()), (false, None));
}

#[test]
fn an_end_that_a_mask_forbids_waits_for_the_first_token_that_may_come() {
    let rules = rules();
    let mut request = thinking(SamplerLimits { max_think_tokens: 1, ..SamplerLimits::default() });
    // Tokens that a mask left instead of the first of the phrase.
    for token in [30, 31, 32] {
        request.demand(&rules);
        request.push(&rules, token);
    }
    assert_eq!(request.forced(), None);
    for token in [40, 41, 8, 9, 3] {
        assert_eq!(request.demand(&rules), Demand::Force(token), "the whole ending");
        request.push(&rules, token);
    }
    assert_eq!(request.forced(), Some((3, ForceReason::HardCap)));
}

#[test]
fn a_client_with_a_stop_in_the_phrase_gets_the_marker_alone() {
    let rules = rules();
    let mut request = thinking(SamplerLimits { max_think_tokens: 0, is_plain: true, ..SamplerLimits::default() });
    for token in [8, 9] {
        assert_eq!(request.demand(&rules), Demand::Force(token));
        request.push(&rules, token);
    }
    assert_eq!(request.demand(&rules), Demand::Free);
}

#[test]
fn a_request_that_answers_at_once_is_never_forced() {
    let rules = {
        let markers = Markers::new(vec![vec![START]], vec![GUARDED.to_vec()], vec![3]).expect("valid markers");
        EndRules::new(markers.with_resuming(false), vec![]).expect("an end marker")
    };
    let mut request = Enforcer::new(&rules, &[1, 2], SamplerLimits { max_think_tokens: 0, ..SamplerLimits::default() });
    request.push(&rules, 50);
    for token in [51, 52, 53] {
        request.push(&rules, token);
        assert_eq!(request.demand(&rules), Demand::Free);
    }
}

#[test]
fn an_interrupt_ends_thinking_behind_its_last_token() {
    let interrupts = [vec![30, 31]].map(|tokens| Pattern::new(tokens).unwrap()).to_vec();
    let mut request = thinking(SamplerLimits { interrupts: interrupts.into(), ..SamplerLimits::default() });
    let out = run(&mut request, &mut [30, 30, 31, 99].into_iter(), 8);
    assert_eq!(out, [30, 30, 31, 40, 41, 8, 9, 3]);
    assert_eq!(request.forced(), Some((3, ForceReason::Pattern)));
}

#[test]
fn an_end_of_sequence_becomes_the_whole_marker_without_the_phrase() {
    let rules = rules();
    let mut request = thinking(SamplerLimits::default());
    request.push(&rules, 20);
    assert_eq!(request.demand(&rules), Demand::Guarded);
    request.push_guarded(&rules, rules.guard_token());
    assert_eq!(request.demand(&rules), Demand::Force(9));
    request.push(&rules, 9);
    assert_eq!(request.demand(&rules), Demand::Free);
    assert_eq!(request.forced(), Some((1, ForceReason::EosGuard)));
    // Replayed without being told again.
    let mut again = request.clone();
    again.replay(&rules, [20, 8]);
    assert_eq!(again.demand(&rules), Demand::Force(9));
}

#[test]
fn without_the_guard_nothing_is_guarded() {
    let mut request = thinking(SamplerLimits { guards_eos: false, ..SamplerLimits::default() });
    assert_eq!(request.demand(&rules()), Demand::Free);
}

#[test]
fn a_limit_said_ahead_holds_from_its_token_on_and_a_late_one_from_now() {
    let rules = rules();
    let mut request = thinking(SamplerLimits { max_think_tokens: 100, ..SamplerLimits::default() });
    request.limit_from(3, 0);
    let out = run(&mut request, &mut (20..), 4);
    assert_eq!(out, [20, 21, 22, 40]);

    let mut late = thinking(SamplerLimits { max_think_tokens: 100, ..SamplerLimits::default() });
    run(&mut late, &mut (20..), 5);
    late.limit_from(2, 0);
    assert_eq!(late.demand(&rules), Demand::Force(40));
    late.push(&rules, 40);
    assert_eq!(late.forced(), Some((5, ForceReason::HardCap)));
    // And it may be taken back before it holds.
    let mut back = thinking(SamplerLimits { max_think_tokens: 100, ..SamplerLimits::default() });
    back.limit_from(2, 0);
    back.limit_from(2, 50);
    run(&mut back, &mut (20..), 10);
    assert_eq!(back.forced(), None);
}

#[test]
fn rules_need_an_end_marker() {
    assert!(matches!(EndRules::new(Markers::default(), vec![]), Err(Error::Markers { .. })));
    let markers = Markers::new(vec![vec![7]], vec![vec![8]], vec![]).unwrap();
    assert!(matches!(EndRules::new(markers, vec![40]), Err(Error::Markers { .. })));
}

proptest! {
    /// Whatever a sampler makes of the demands it follows: thinking is over at the latest when the ending is out, and the
    /// ending begins exactly at the limit unless the model ended before.
    #[test]
    fn no_limit_is_passed(cap in 0u32..40, wished in prop::collection::vec(prop_oneof![8u32..10, 20u32..25, Just(40)], 60)) {
        let mut request = thinking(SamplerLimits { max_think_tokens: cap, ..SamplerLimits::default() });
        run(&mut request, &mut wished.into_iter().chain(20..), 60);
        prop_assert!(!request.is_thinking());
        if let Some((at, reason)) = request.forced() {
            prop_assert_eq!((at, reason), (cap, ForceReason::HardCap));
        } else {
            prop_assert!(request.think_tokens() <= cap + 1);
        }
    }

    /// A request that is preempted anywhere, and whose tokens are replayed, is demanded the same: the tokens after are those
    /// that it would have had.
    #[test]
    fn a_replay_changes_nothing(
        cap in 0u32..30,
        changes in prop::collection::vec((0u32..40, 0u32..40), 0..4),
        cut in 0usize..50,
        seed in prop::collection::vec(prop_oneof![8u32..10, 20u32..25], 50),
    ) {
        let rules = rules();
        let limits = SamplerLimits { max_think_tokens: cap, ..SamplerLimits::default() };
        let mut whole = thinking(limits.clone());
        changes.iter().for_each(|(from, max)| whole.limit_from(*from, *max));
        let mut replayed = whole.clone();
        let mut wished = seed.clone().into_iter().chain(20..);
        let out = run(&mut whole, &mut wished, 50);
        replayed.replay(&rules, out[..cut].iter().copied());
        let mut again = Vec::new();
        for token in &out[cut..] {
            let demand = replayed.demand(&rules);
            again.push(match demand { Demand::Force(forced) => forced, _ => *token });
            replayed.push(&rules, *token);
        }
        prop_assert_eq!(&again, &out[cut..]);
        prop_assert_eq!(replayed.forced(), whole.forced());
    }

    /// Two who are told the same ahead of time, at different moments, demand the same.
    #[test]
    fn an_order_ahead_holds_at_its_token_whenever_it_is_heard(heard in 0usize..20, from in 20u32..30) {
        let mut early = thinking(SamplerLimits::default());
        early.limit_from(from, 0);
        let mut late = thinking(SamplerLimits::default());
        let one = run(&mut early, &mut (1000..), 35);
        let mut two = run(&mut late, &mut (1000..), heard);
        late.limit_from(from, 0);
        two.extend(run(&mut late, &mut (1000 + heard as u32..), 35 - heard));
        prop_assert_eq!(one, two);
    }

    /// Any message is read or passed over, never more.
    #[test]
    fn hostile_messages_are_passed_over(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let whole = bytes.len() / Order::BYTES;
        prop_assert!(Order::read_all(&bytes).count() <= whole);
        prop_assert!(Report::read_all(&bytes).count() <= whole);
        let mut written = Vec::new();
        Order::read_all(&bytes).for_each(|order| order.write(&mut written));
        let again: Vec<_> = Order::read_all(&written).collect();
        prop_assert_eq!(Order::read_all(&bytes).collect::<Vec<_>>(), again);
    }
}
