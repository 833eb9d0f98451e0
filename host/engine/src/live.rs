//! Changes of live requests' thinking from other threads: a queue that the scheduling thread empties before a step.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use meridian_core::budget::{Changed, ForceReason};
use meridian_core::{RowId, ThinkPhase};

use crate::Driver;
use crate::budgets::{BudgetList, ChangeError, ChangeReport, LiveBudget, LiveBudgets, LiveChange, MOST_LISTED};

/// Most changes that wait for a step.
const MOST_WAITING: usize = 16;
/// Without a step for this time, the caller carries out the change itself.
const NO_STEP: Duration = Duration::from_millis(100);

type Done = Result<ChangeReport, ChangeError>;

/// Changes that wait for the scheduling thread.
#[derive(Default)]
pub(crate) struct LiveChanges {
    /// Read once before each step; the lock is taken only if it is set.
    is_any: AtomicBool,
    waiting: Mutex<VecDeque<(LiveChange, SyncSender<Done>)>>,
}

impl LiveChanges {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(LiveChange, SyncSender<Done>)>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, change: LiveChange) -> Result<Receiver<Done>, ChangeError> {
        let mut waiting = self.lock();
        if waiting.len() >= MOST_WAITING {
            return Err(ChangeError::Busy(format!("{MOST_WAITING} changes wait for a step already")));
        }
        let (sender, receiver) = sync_channel(1);
        waiting.push_back((change, sender));
        self.is_any.store(true, Ordering::Release);
        Ok(receiver)
    }

    /// The waiting changes; none while another thread adds one, which the next call takes.
    fn take(&self) -> VecDeque<(LiveChange, SyncSender<Done>)> {
        if !self.is_any.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        match self.waiting.try_lock() {
            Ok(mut waiting) => {
                self.is_any.store(false, Ordering::Release);
                std::mem::take(&mut waiting)
            }
            Err(_) => VecDeque::new(),
        }
    }
}

impl Driver {
    /// Carry out the waiting changes of live requests' thinking. Called before each step; never waits.
    pub(crate) fn take_changes(&mut self) {
        for (change, asked_by) in self.changes.take() {
            let done = self.change_budgets(&change);
            // The caller may have given up.
            let _ = asked_by.try_send(done);
        }
    }

    /// Change the thinking of live requests, from the next step on.
    ///
    /// # Errors
    /// One line: no request was changed.
    pub fn change_budgets(&mut self, change: &LiveChange) -> Result<ChangeReport, ChangeError> {
        change.validate().map_err(|error| ChangeError::NothingToChange(error.to_string()))?;
        self.check_follows()?;
        let rows = self.meant(change)?;
        let Self { thinking: Some(budgets), scheduler, .. } = &mut *self else { return Err(follows_none()) };
        let table = &mut scheduler.mirror().table;
        let mut report = ChangeReport::default();
        let mut unreached = 0;
        let mut changed = Vec::new();
        for (id, row) in rows {
            budgets.enroll_late(table, row, &id);
            match budgets.change(table, row, change) {
                Some(Changed::Yes) => changed.push((id, row)),
                Some(Changed::Answers) => report.answering += 1,
                Some(Changed::Ends) => report.ending += 1,
                None => unreached += 1,
            }
        }
        report.changed = changed.len() as u64;
        if changed.is_empty() {
            let ChangeReport { answering, ending, .. } = report;
            let which = change.request.as_ref().or(change.tenant.as_ref()).map_or("all", |name| name);
            let unreached = match unreached {
                0 => String::new(),
                count => format!(
                    ", {count} had no budget when they arrived, and cannot be followed later: set \
                     scheduler.max_think_tokens"
                ),
            };
            return Err(ChangeError::NothingToChange(format!(
                "{which}: no request that thinks: {answering} answer already, {ending} are about to end their \
                 thinking{unreached}"
            )));
        }
        changed.truncate(MOST_LISTED);
        report.requests = changed.into_iter().filter_map(|(id, row)| self.live_budget(&id, row)).collect();
        tracing::info!(changed = report.changed, "the thinking budgets of live requests were changed");
        Ok(report)
    }

    /// The live requests whose thinking is followed.
    ///
    /// # Errors
    /// [`ChangeError::NothingToChange`] when the engine follows none.
    pub fn live_budgets(&mut self) -> Result<BudgetList, ChangeError> {
        self.check_follows()?;
        let mut rows: Vec<_> = self.by_id.iter().map(|(id, row)| (id.clone(), *row)).collect();
        let table = &self.scheduler.mirror().table;
        rows.sort_by_cached_key(|(id, row)| {
            (table.get(*row).map(|request| request.phase() == ThinkPhase::Output), id.clone())
        });
        let mut list = BudgetList::default();
        for (id, row) in rows {
            let Some(found) = self.live_budget(&id, row) else { continue };
            list.live += 1;
            if list.requests.len() < MOST_LISTED {
                list.requests.push(found);
            }
        }
        Ok(list)
    }

    fn check_follows(&mut self) -> Result<(), ChangeError> {
        if self.thinking.is_none() {
            return Err(follows_none());
        }
        if self.is_stock() {
            return Err(ChangeError::NothingToChange(
                "the engine is stock while native:fcfs decides: its thinking is not Meridian's".into(),
            ));
        }
        Ok(())
    }

    fn live_budget(&mut self, id: &str, row: RowId) -> Option<LiveBudget> {
        let Self { thinking: Some(budgets), scheduler, .. } = &mut *self else { return None };
        let table = &scheduler.mirror().table;
        let request = table.get(row)?;
        let thinking = budgets.thinking_of(table, row)?;
        let phase = match request.phase() {
            ThinkPhase::Prefill => "prefill",
            ThinkPhase::Think => "think",
            ThinkPhase::Output => "output",
        };
        Some(LiveBudget {
            request: id.to_owned(),
            tenant: table.tenant_name(request.tenant()).to_owned(),
            phase: phase.into(),
            think_tokens: thinking.think_tokens,
            min_think_tokens: thinking.min_think_tokens,
            max_think_tokens: thinking.max_think_tokens,
            ends_by: thinking.ends_by.map(|reason: ForceReason| reason.label().to_owned()),
        })
    }

    /// The live requests that a change means.
    fn meant(&mut self, change: &LiveChange) -> Result<Vec<(Box<str>, RowId)>, ChangeError> {
        let none = |why: String| Err(ChangeError::NoSuchRequest(why));
        let live = self.by_id.iter().map(|(id, row)| (id.clone(), *row));
        if let Some(name) = &change.request {
            let mut found: Vec<_> = live.clone().filter(|(id, _)| is_named(id, name)).collect();
            if found.is_empty() {
                found = live.filter(|(id, _)| id.contains(name.as_str())).collect();
                if let [(one, _), (other, _), ..] = found.as_slice() {
                    let count = found.len();
                    return none(format!("{name}: {count} requests have this in their id: {one}, {other} ..."));
                }
            }
            if found.is_empty() {
                return none(format!("{name}: no live request has this id"));
            }
            found.sort_unstable_by(|one, other| one.0.cmp(&other.0));
            return Ok(found);
        }
        let live: Vec<_> = live.collect();
        let table = &self.scheduler.mirror().table;
        if let Some(name) = &change.tenant {
            let number = table.tenant(name);
            let of_it = |row: &(Box<str>, RowId)| table.get(row.1).map(meridian_core::RequestState::tenant) == number;
            let found: Vec<_> = if number.is_none() { Vec::new() } else { live.into_iter().filter(of_it).collect() };
            if found.is_empty() {
                return none(format!("{name}: this tenant has no live request"));
            }
            return Ok(found);
        }
        if live.is_empty() {
            return none("all: no request is live".into());
        }
        Ok(live)
    }
}

fn follows_none() -> ChangeError {
    ChangeError::NothingToChange(
        "this engine ends no thinking: it needs --logits-processors meridian.vllm:BudgetLogitsProcessor and a model with \
         markers"
            .into(),
    )
}

/// Whether the engine's `id` is of the request that its client knows as `name`. vLLM appends 8 hexadecimal digits to the
/// client's name, and puts a number before it for each of several answers to one request.
fn is_named(id: &str, name: &str) -> bool {
    let is_client_s = |id: &str| {
        let end = id.strip_prefix(name).and_then(|rest| rest.strip_prefix('-'));
        id == name || end.is_some_and(|end| end.len() == 8 && end.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let one_of_several = id.split_once('_').filter(|(number, _)| number.bytes().all(|byte| byte.is_ascii_digit()));
    is_client_s(id) || one_of_several.is_some_and(|(_, id)| is_client_s(id))
}

/// The thinking budgets of an engine, once its driver exists.
pub(crate) struct DriverBudgets {
    pub(crate) driver: Arc<OnceLock<Weak<Mutex<Driver>>>>,
    pub(crate) changes: Arc<LiveChanges>,
}

impl DriverBudgets {
    fn with<T>(&self, call: impl FnOnce(&mut Driver) -> T) -> Result<T, ChangeError> {
        let ends = || ChangeError::Busy("the engine ends".into());
        let driver = self.driver.get().and_then(Weak::upgrade).ok_or_else(ends)?;
        let mut driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(call(&mut driver))
    }
}

impl LiveBudgets for DriverBudgets {
    fn list(&self) -> Result<BudgetList, ChangeError> {
        self.with(Driver::live_budgets)?
    }

    fn change(&self, change: LiveChange) -> Result<ChangeReport, ChangeError> {
        let done = self.changes.push(change)?;
        match done.recv_timeout(NO_STEP) {
            Ok(done) => return done,
            Err(RecvTimeoutError::Disconnected) => return Err(ChangeError::Busy("the engine ends".into())),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // No step has begun; it may have taken the change since.
        self.with(Driver::take_changes)?;
        done.recv_timeout(NO_STEP).unwrap_or_else(|_| Err(ChangeError::Busy("the change was lost".into())))
    }
}
