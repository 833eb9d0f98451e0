//! Every engine at once, one a row. A change is not atomic: the rows say which version decides where, and the exit code
//! that some engines did not do as asked.

use anyhow::ensure;
use meridian_engine::control::{ProcessStatus, SlotName, SlotStatus, SwapReport, UNCHANGED, Version};
use meridian_fleet::{AT_A_TIME, EngineClient, Fleet, Member, MemberError, each};
use serde_json::{Value, json};

use super::change::Change;
use super::fault_text;
use super::status::{rank_text, version_text};
use crate::progress::bar;
use crate::target::{NONE_HERE, shown};
use crate::{print_json, print_line};

/// Engines whose faults are read at a time: they may be large.
const LARGE_AT_A_TIME: usize = 2;

/// Ask every engine, with a bar on a terminal.
pub(super) fn ask<T: Send>(fleet: &Fleet, at_a_time: usize, ask: impl Fn(&EngineClient) -> T + Sync) -> Vec<T> {
    let under_way = bar(fleet.engines.len() as u64, "engines");
    let results = each(&fleet.engines, at_a_time, |engine| {
        let result = ask(engine);
        under_way.inc(1);
        result
    });
    under_way.finish_and_clear();
    results
}

/// Print a line for each engine that did not answer or did not do as asked and for each malformed discovery file, and
/// fail if there is one. `json` has them already.
pub(super) fn fail(fleet: &Fleet, failed: usize, what: &str, json: bool) -> anyhow::Result<()> {
    let Fleet { engines, malformed } = fleet;
    if json {
        return if failed + malformed.len() > 0 { Err(crate::Said.into()) } else { Ok(()) };
    }
    malformed.iter().try_for_each(|line| print_line(&shown(line)))?;
    ensure!(failed == 0, "{failed} of {} {what}", engines.len());
    ensure!(malformed.is_empty(), "{} discovery files cannot be used; they are safe to delete", malformed.len());
    Ok(())
}

/// Those of the discovery files, for an object.
pub(super) fn malformed(fleet: &Fleet) -> impl Iterator<Item = Value> {
    fleet.malformed.iter().map(|error| json!({ "error": error }))
}

/// A change needs somebody to make it.
pub(super) fn require_some(fleet: &Fleet) -> anyhow::Result<()> {
    ensure!(!fleet.engines.is_empty() || !fleet.malformed.is_empty(), "{NONE_HERE}; name them by --fleet");
    Ok(())
}

/// An engine, what it did, and what it says of itself afterwards.
struct Row<'a> {
    engine: &'a EngineClient,
    done: Result<SwapReport, MemberError>,
    status: Option<ProcessStatus>,
}

impl Row<'_> {
    /// The version that decides now. The engine's own report counts only where the engine says no more.
    fn active(&self, slot: SlotName) -> Option<&Version> {
        let slots = self.status.as_ref().map(|status| &status.slots);
        let active = slots.and_then(|slots| slots.iter().find(|of| of.slot == slot)).map(|of| &of.active);
        active.or_else(|| self.done.as_ref().ok().map(|report| &report.active))
    }

    fn result(&self) -> &str {
        match &self.done {
            Ok(report) if report.action == UNCHANGED => UNCHANGED,
            Ok(_) => "changed",
            Err(MemberError::Refused(_)) => "refused",
            // The change may have been carried out.
            Err(MemberError::Unreachable(_)) => "unknown",
        }
    }

    fn error(&self) -> Option<String> {
        self.done.as_ref().err().map(ToString::to_string)
    }
}

/// Make a change in every engine, and print which version decides in each.
pub(super) fn change(fleet: &Fleet, slot: SlotName, change: &Change, json: bool) -> anyhow::Result<()> {
    require_some(fleet)?;
    let asked = ask(fleet, AT_A_TIME, |engine| {
        let done = change.make(engine, slot);
        (done, engine.status().ok())
    });
    let rows: Vec<_> =
        fleet.engines.iter().zip(asked).map(|(engine, (done, status))| Row { engine, done, status }).collect();
    let failed = rows.iter().filter(|row| row.done.is_err()).count();
    let versions = versions(&rows, slot);
    if json {
        let engines: Vec<_> = rows.iter().map(|row| object(row, slot)).chain(malformed(fleet)).collect();
        let versions: Vec<_> = versions
            .iter()
            .map(|(version, rows)| {
                let engines: Vec<_> = rows.iter().map(|row| row.engine.name()).collect();
                json!({ "active": version, "engines": engines })
            })
            .collect();
        let ok = failed + fleet.malformed.len() == 0;
        print_json(&json!({ "ok": ok, "slot": slot, "engines": engines, "versions": versions }))?;
    } else {
        let lines = rows.iter().map(|row| {
            let decides = row.active(slot).map_or_else(|| "not known".into(), version_text);
            let error = row.error().unwrap_or_default();
            [who(row.engine, row.status.as_ref()), vec![row.result().to_owned(), decides, error]].concat()
        });
        print_table(&["engine", "pid", "rank", "result", "decides", ""], lines.collect())?;
        if let [_, _, ..] = versions.as_slice() {
            let each = versions.iter().map(|(version, rows)| {
                let version = version.map_or_else(|| "an unknown version".into(), version_text);
                format!("{version} on {}", rows.len())
            });
            print_line(&format!("{}: engines differ: {}", slot.label(), each.collect::<Vec<_>>().join("; ")))?;
        }
    }
    let hint = if change.is_repeatable() { "; repeat the command: the others stay unchanged" } else { "" };
    fail(fleet, failed, &format!("engines did not do as asked, see their rows{hint}"), json)
}

/// The rows by the version that decides in them, in the order of their first row.
fn versions<'a>(rows: &'a [Row<'_>], slot: SlotName) -> Vec<(Option<&'a Version>, Vec<&'a Row<'a>>)> {
    let mut versions: Vec<(Option<&Version>, Vec<&Row<'_>>)> = Vec::new();
    for row in rows {
        let active = row.active(slot);
        match versions.iter_mut().find(|(version, _)| is_same(*version, active)) {
            Some((_, same)) => same.push(row),
            None => versions.push((active, vec![row])),
        }
    }
    versions
}

/// The source of a version differs where it came by another way.
fn is_same(one: Option<&Version>, other: Option<&Version>) -> bool {
    let of = |version: &Version| {
        let Version { name, version, sha256, source: _, options } = version.clone();
        [name, version, sha256, options]
    };
    one.map(of) == other.map(of)
}

fn object(row: &Row<'_>, slot: SlotName) -> Value {
    let mut object = json!({
        "engine": row.engine.name(),
        "address": row.engine.address(),
        "result": row.result(),
        "active": row.active(slot),
    });
    if let Some(status) = &row.status {
        object["pid"] = status.pid.into();
        object["dp_rank"] = status.dp_rank.into();
    }
    match &row.done {
        Ok(report) => object["report"] = json!(report),
        Err(error) => object["error"] = error.to_string().into(),
    }
    object
}

/// The state of every engine. Fails when one of them does not answer or its discovery file is malformed, after those
/// that do.
pub(super) fn status(fleet: &Fleet, json: bool) -> anyhow::Result<()> {
    let asked = ask(fleet, AT_A_TIME, Member::status);
    let asked: Vec<_> = fleet.engines.iter().zip(&asked).collect();
    let silent = asked.iter().filter(|(_, status)| status.is_err()).count();
    if json {
        let processes: Vec<_> = asked
            .iter()
            .map(|(engine, status)| match status {
                Ok(status) => json!({ "name": engine.name(), "address": engine.address(), "status": status }),
                Err(error) => {
                    json!({ "name": engine.name(), "address": engine.address(), "error": error.to_string() })
                }
            })
            .chain(malformed(fleet))
            .collect();
        print_json(&json!({ "processes": processes }))?;
    } else if asked.is_empty() && fleet.malformed.is_empty() {
        print_line(NONE_HERE)?;
    } else {
        let rows = asked.iter().map(|(engine, status)| match status {
            Ok(status) => [who(engine, Some(status)), state(status)].concat(),
            Err(error) => [who(engine, None), vec![error.to_string()]].concat(),
        });
        print_table(&["engine", "pid", "rank", "model", "up", "live", "waiting", "decides", "notes"], rows.collect())?;
    }
    fail(fleet, silent, "engine processes did not answer", json)
}

fn state(status: &ProcessStatus) -> Vec<String> {
    let live: u64 = status.requests.iter().sum();
    let decides = status.slots.iter().map(|slot| format!("{} {}", slot.slot.label(), version_text(&slot.active)));
    let decides = decides.collect::<Vec<_>>().join(", ");
    let problems = match status.problems.len() {
        0 => None,
        problems => Some(format!("{problems} problems: see `meridian ctl status --pid {}`", status.pid)),
    };
    let notes = status.slots.iter().filter_map(note).chain(problems);
    let up = format!("{:.0} s", status.uptime_s);
    let (live, waiting) = (live.to_string(), status.waiting.to_string());
    vec![shown(&status.model), up, live, waiting, decides, notes.collect::<Vec<_>>().join("; ")]
}

/// A shadow and a quarantine of a slot.
fn note(slot: &SlotStatus) -> Option<String> {
    let label = slot.slot.label();
    let shadow = slot.shadow.as_ref().map(|shadow| format!("{label} shadow {}", version_text(&shadow.version)));
    let quarantine =
        slot.quarantine.as_ref().map(|(version, _)| format!("{label} quarantine {}", version_text(version)));
    let notes: Vec<_> = shadow.into_iter().chain(quarantine).collect();
    (!notes.is_empty()).then(|| notes.join("; "))
}

/// Name, process and data-parallel rank.
pub(super) fn who(engine: &EngineClient, status: Option<&ProcessStatus>) -> Vec<String> {
    let pid = status.map_or_else(|| "-".into(), |status| status.pid.to_string());
    let rank = status.map_or_else(|| "-".into(), |status| rank_text(status.dp_rank, status.dp_size));
    vec![shown(engine.name()), pid, rank]
}

/// The latest faults of every engine.
pub(super) fn faults(fleet: &Fleet, json: bool) -> anyhow::Result<()> {
    let asked = ask(fleet, LARGE_AT_A_TIME, EngineClient::faults);
    let asked: Vec<_> = fleet.engines.iter().zip(&asked).collect();
    let silent = asked.iter().filter(|(_, faults)| faults.is_err()).count();
    if json {
        let engines: Vec<_> = asked
            .iter()
            .map(|(engine, faults)| match faults {
                Ok(faults) => json!({ "engine": engine.name(), "address": engine.address(), "faults": faults }),
                Err(error) => {
                    json!({ "engine": engine.name(), "address": engine.address(), "error": error.to_string() })
                }
            })
            .chain(malformed(fleet))
            .collect();
        print_json(&json!({ "engines": engines }))?;
    } else if asked.is_empty() && fleet.malformed.is_empty() {
        print_line(NONE_HERE)?;
    } else {
        for (engine, faults) in &asked {
            match faults {
                Ok(faults) if faults.is_empty() => print_line(&format!("{}: no faults", shown(engine.name())))?,
                Ok(faults) => {
                    print_line(&format!("{}: {} faults", shown(engine.name()), faults.len()))?;
                    faults.iter().try_for_each(|fault| print_line(&fault_text(fault)))?;
                }
                Err(error) => print_line(&error.to_string())?,
            }
        }
    }
    fail(fleet, silent, "engine processes did not answer", json)
}

/// Print columns as wide as their widest cell; a row may end early. The last cell of a row takes what it needs.
pub(super) fn print_table(head: &[&str], rows: Vec<Vec<String>>) -> anyhow::Result<()> {
    let head = head.iter().map(|cell| (*cell).to_owned()).collect();
    let rows: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let mut widths = Vec::new();
    for row in &rows {
        let Some((_, cells)) = row.split_last() else { continue };
        for (column, cell) in cells.iter().enumerate() {
            if widths.len() <= column {
                widths.resize(column + 1, 0);
            }
            widths[column] = cell.chars().count().max(widths[column]);
        }
    }
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            line.push_str(cell);
            if column + 1 < row.len() {
                let missing = widths.get(column).copied().unwrap_or(0).saturating_sub(cell.chars().count());
                line.extend(std::iter::repeat_n(' ', missing + 2));
            }
        }
        print_line(line.trim_end())?;
    }
    Ok(())
}
