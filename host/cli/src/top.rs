mod handoff;
mod view;

use std::io::{IsTerminal, stdin, stdout};
use std::time::{Duration, Instant};

use clap::Args;
use meridian_engine::control::ProcessStatus;
use meridian_fleet::{Endpoint, EngineClient, HandoffStatus, Member};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::Widget;

use self::handoff::FrontView;
use self::view::{Look, View};
pub(crate) use self::view::{all_tenants, time};
use crate::target::Target;
use crate::{print_json, print_line};

#[derive(Args)]
#[command(after_help = "\
Press q to quit. Without a terminal, the command prints one frame as text, 80 columns wide. The frame has no
colour where NO_COLOR is set or TERM is dumb. Latencies are those of the interval before; in the first frame, and
without requests in the interval, those since the start.

Example:
  meridian top --interval 0.5
  meridian top --handoff http://127.0.0.1:8000")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    target: Target,
    /// Set the seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
    /// Show the front of a handoff at this address instead of an engine
    #[arg(long, value_name = "URL", value_parser = crate::handoff::engine, conflicts_with_all = ["pid", "address", "fleet", "engine"])]
    handoff: Option<Endpoint>,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be from 0.1 to 3600".into()),
    }
}

pub(crate) fn run(args: &TopArgs, json: bool) -> anyhow::Result<()> {
    let interval = Duration::from_secs_f64(args.interval);
    if let Some(front) = &args.handoff {
        let ask = || HandoffStatus::ask(front).map_err(|error| anyhow::anyhow!("--handoff: {error}"));
        let now = ask()?;
        if json {
            return print_json(&now);
        }
        let view = FrontView::new(now);
        if stdout().is_terminal() && stdin().is_terminal() {
            return live(view, interval, |view| view.update(ask()));
        }
        return view.lines().iter().try_for_each(|line| Ok(print_line(line)?));
    }
    let engine = args.target.one()?;
    let now = look(&engine)?;
    if json {
        return print_json(&now.status);
    }
    let view = View::new(engine.address(), now, is_plain());
    if stdout().is_terminal() && stdin().is_terminal() {
        return live(view, interval, |view| view.update(look(&engine)));
    }
    view.text().iter().try_for_each(|line| Ok(print_line(line)?))
}

/// The state of the engine, and its latest faults.
fn look(engine: &EngineClient) -> anyhow::Result<Look> {
    let status: ProcessStatus = engine.status()?;
    let has_faults = status.slots.iter().flat_map(|slot| &slot.faults).any(|(_, count)| *count > 0);
    let faults = if has_faults { engine.faults()? } else { Vec::new() };
    Ok(Look { status, faults })
}

/// Whether the terminal is to have no colour (https://no-color.org).
fn is_plain() -> bool {
    let is_set = |name: &str, is: fn(&str) -> bool| std::env::var(name).is_ok_and(|value| is(&value));
    is_set("NO_COLOR", |value| !value.is_empty()) || is_set("TERM", |value| value == "dumb")
}

/// Restores the terminal on drop, even after a panic; the panic hook of `try_init` does so before the message.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn live<V>(mut view: V, interval: Duration, update: impl Fn(&mut V)) -> anyhow::Result<()>
where
    for<'a> &'a V: Widget,
{
    let restore = Restore;
    let mut terminal = ratatui::try_init()?;
    loop {
        terminal.draw(|frame| frame.render_widget(&view, frame.area()))?;
        let next = Instant::now() + interval;
        loop {
            let left = next.saturating_duration_since(Instant::now());
            if !event::poll(left)? {
                break;
            }
            match event::read()? {
                Event::Key(key) if quits(key) => {
                    drop(restore);
                    return Ok(());
                }
                Event::Resize(..) => {
                    terminal.draw(|frame| frame.render_widget(&view, frame.area()))?;
                }
                _ => {}
            }
        }
        update(&mut view);
    }
}

fn quits(KeyEvent { code, modifiers, kind, .. }: KeyEvent) -> bool {
    let interrupted = code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    kind == KeyEventKind::Press && (interrupted || matches!(code, KeyCode::Char('q' | 'Q') | KeyCode::Esc))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let key = |code, modifiers| KeyEvent::new(code, modifiers);
        assert!(quits(key(KeyCode::Char('q'), KeyModifiers::NONE)));
        assert!(quits(key(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!quits(key(KeyCode::Char('c'), KeyModifiers::NONE)));
        assert!(!quits(key(KeyCode::Enter, KeyModifiers::NONE)));
    }
}
