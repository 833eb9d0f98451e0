use std::io::{IsTerminal, stdin, stdout};
use std::time::{Duration, Instant};

use clap::Args;
use meridian_runtime::control::{ProcessStatus, SlotStatus};
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Widget};

use crate::admin_client::{Engine, Target, shown};
use crate::ctl::{faults_text, shadow_text, version_text};
use crate::{print_json, print_line};

/// Columns of a frame that is printed as text.
const TEXT_WIDTH: u16 = 120;
/// Width of a bar, columns.
const BAR: u64 = 40;

#[derive(Args)]
#[command(after_help = "\
Press q to quit. Without a terminal, the command prints one frame as text.

Example:
  meridian top --interval 0.5")]
pub(crate) struct TopArgs {
    #[command(flatten)]
    target: Target,
    /// Set the seconds between two updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = interval)]
    interval: f64,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("must be from 0.1 to 3600".into()),
    }
}

pub(crate) fn run(args: &TopArgs, json: bool) -> anyhow::Result<()> {
    let engine = args.target.one()?;
    let now = engine.status()?;
    if json {
        return print_json(&now);
    }
    let view = View { address: engine.address.clone(), now, before: None, problem: None };
    if stdout().is_terminal() && stdin().is_terminal() {
        return live(&engine, view, Duration::from_secs_f64(args.interval));
    }
    view.text().iter().try_for_each(|line| Ok(print_line(line)?))
}

/// Restores the terminal on drop, even after a panic; the panic hook of `try_init` does so before the message.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn live(engine: &Engine, mut view: View, interval: Duration) -> anyhow::Result<()> {
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
        view.update(engine.status());
    }
}

fn quits(KeyEvent { code, modifiers, kind, .. }: KeyEvent) -> bool {
    let interrupted = code == KeyCode::Char('c') && modifiers.contains(KeyModifiers::CONTROL);
    kind == KeyEventKind::Press && (interrupted || matches!(code, KeyCode::Char('q' | 'Q') | KeyCode::Esc))
}

/// What is shown.
struct View {
    address: String,
    now: ProcessStatus,
    /// The look before, for rates.
    before: Option<ProcessStatus>,
    /// Why `now` is not of now.
    problem: Option<String>,
}

impl View {
    fn update(&mut self, asked: anyhow::Result<ProcessStatus>) {
        match asked {
            Ok(now) => {
                // Another process may listen there by now.
                let same = now.pid == self.now.pid;
                let before = std::mem::replace(&mut self.now, now);
                self.before = same.then_some(before);
                self.problem = None;
            }
            Err(error) => self.problem = Some(shown(&format!("{error:#}"))),
        }
    }

    /// Decisions a second since the look before, on the clock of the process.
    fn rate(&self, slot: &SlotStatus) -> Option<f64> {
        let before = self.before.as_ref()?;
        let earlier = before.slots.iter().find(|earlier| earlier.slot == slot.slot)?;
        let seconds = self.now.uptime_s - before.uptime_s;
        let count = |slot: &SlotStatus| slot.decisions.iter().sum::<u64>();
        (seconds > 0.0).then(|| float(count(slot).saturating_sub(count(earlier))) / seconds)
    }

    fn head(&self) -> Line<'static> {
        let ProcessStatus { pid, version, model, uptime_s, .. } = &self.now;
        let (model, version) = (shown(model), shown(version));
        let text = format!(" meridian {version}  pid {pid}  {model}  up {}  {} ", clock(*uptime_s), self.address);
        Line::styled(text, Modifier::BOLD)
    }

    fn requests(&self) -> Vec<Line<'static>> {
        let ProcessStatus { requests, waiting, preemptions, step_time_ms, .. } = &self.now;
        let most = requests.iter().chain([waiting]).copied().max().unwrap_or(0).max(1);
        let bar = |count: u64| "#".repeat(usize::try_from((count * BAR).div_ceil(most)).unwrap_or(0));
        let mut lines = vec![heading(format!("{:<9}{:>7}{:>11}", "phase", "live", "preempted"))];
        let phases = [("prefill", Color::Blue), ("think", Color::Magenta), ("output", Color::Green)];
        for ((phase, color), (live, preempted)) in phases.into_iter().zip(requests.iter().zip(preemptions)) {
            let counts = format!("{phase:<9}{live:>7}{preempted:>11}  ");
            lines.push(Line::from(vec![counts.into(), Span::styled(bar(*live), color)]));
        }
        let waits = format!("{:<9}{waiting:>7}{:>11}  ", "waiting", "");
        lines.push(Line::from(vec![waits.into(), Span::styled(bar(*waiting), Color::Yellow)]));
        if let Some([fixed, decode, prefill]) = step_time_ms {
            lines.push(Line::from(format!(
                "step     {fixed:.3} ms, {decode:.4} ms a decode token, {prefill:.4} ms a prefill token"
            )));
        }
        lines
    }

    fn slots(&self) -> Vec<Line<'static>> {
        let mut lines = vec![heading(format!(
            "{:<9} {:<34}{:>11}{:>9}{:>8}{:>8}{:>9}{:>9}{:>7}{:>8}{:>6}",
            "slot",
            "active",
            "decisions",
            "per s",
            "policy",
            "default",
            "fallback",
            "mean us",
            "faults",
            "strikes",
            "swaps"
        ))];
        for slot in &self.now.slots {
            let SlotStatus { active, decisions, deciding_s, faults, strikes, swaps, .. } = slot;
            let total: u64 = decisions.iter().sum();
            let [policy, default, fallback] = decisions.map(|count| share(count, total));
            let mean_us = if total == 0 { "-".into() } else { format!("{:.1}", deciding_s * 1e6 / float(total)) };
            let rate = self.rate(slot).map_or_else(|| "-".into(), |rate| format!("{rate:.1}"));
            let faults: u64 = faults.iter().map(|(_, count)| count).sum();
            let name: String = version_text(active).chars().take(33).collect();
            let text = format!(
                "{:<9} {name:<34}{total:>11}{rate:>9}{policy:>8}{default:>8}{fallback:>9}{mean_us:>9}{faults:>7}{strikes:>8}{swaps:>6}",
                slot.slot.label()
            );
            let style = match (slot.quarantine.is_some(), *strikes) {
                (true, _) => Style::new().fg(Color::Red),
                (false, 1..) => Style::new().fg(Color::Yellow),
                (false, 0) => Style::new(),
            };
            lines.push(Line::styled(text, style));
        }
        lines
    }

    fn shadows(&self) -> Vec<Line<'static>> {
        let shadows = self.now.slots.iter().filter_map(|slot| Some((slot.slot, slot.shadow.as_ref()?)));
        shadows.map(|(slot, shadow)| Line::from(format!("{:<9} {}", slot.label(), shadow_text(shadow)))).collect()
    }

    /// What an operator should look at.
    fn troubles(&self) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for SlotStatus { slot, quarantine, faults, last_refusal, .. } in &self.now.slots {
            let slot = slot.label();
            if let Some((version, ms)) = quarantine {
                let text = format!("{slot:<9} quarantine: {}, tried again in {:.0} s", version_text(version), ms / 1e3);
                lines.push(Line::styled(text, Color::Red));
            }
            if !faults.is_empty() {
                lines.push(Line::from(format!("{slot:<9} faults: {}", faults_text(faults))));
            }
            if let Some(refusal) = last_refusal {
                lines.push(Line::from(format!("{slot:<9} refused: {}", shown(refusal))));
            }
        }
        lines
    }

    /// The boxes below the head, from top to bottom.
    fn boxes(&self) -> Vec<(&'static str, Vec<Line<'static>>)> {
        let parts = [
            ("Requests", self.requests()),
            ("Slots", self.slots()),
            ("Shadow", self.shadows()),
            ("Faults", self.troubles()),
        ];
        parts.into_iter().filter(|(_, lines)| !lines.is_empty()).collect()
    }

    /// One frame, as tall as it needs to be.
    fn text(&self) -> Vec<String> {
        let height = 2 + self.boxes().iter().map(|(_, lines)| rows(lines) + 2).sum::<u16>();
        let mut buffer = Buffer::empty(Rect::new(0, 0, TEXT_WIDTH, height));
        self.render(buffer.area, &mut buffer);
        let row = |cells: &[ratatui::buffer::Cell]| cells.iter().map(|cell| cell.symbol()).collect::<String>();
        let lines = buffer.content.chunks(usize::from(TEXT_WIDTH)).map(|cells| row(cells).trim_end().to_owned());
        lines.filter(|line| !line.is_empty()).collect()
    }
}

impl Widget for &View {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let mut rest = area;
        let mut take = |height: u16| {
            let part = Rect { height: height.min(rest.height), ..rest };
            rest = Rect { y: rest.y + part.height, height: rest.height - part.height, ..rest };
            part
        };
        self.head().render(take(1), buffer);
        for (title, lines) in self.boxes() {
            let part = take(rows(&lines) + 2);
            Paragraph::new(lines).block(Block::bordered().title(title)).render(part, buffer);
        }
        let last = take(1);
        match &self.problem {
            Some(problem) => Line::styled(format!(" {problem}"), Color::Red).render(last, buffer),
            None => Line::styled(" q quits", Modifier::DIM).render(last, buffer),
        }
    }
}

fn rows(lines: &[Line<'_>]) -> u16 {
    u16::try_from(lines.len()).unwrap_or(u16::MAX - 2)
}

fn heading(text: String) -> Line<'static> {
    Line::styled(text, Modifier::DIM)
}

fn share(count: u64, total: u64) -> String {
    if total == 0 { "-".into() } else { format!("{:.1}%", 100.0 * float(count) / float(total)) }
}

fn clock(seconds: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a conversion to integers saturates")]
    let seconds = seconds as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[expect(clippy::cast_precision_loss, reason = "shown with four digits")]
fn float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use meridian_runtime::control::{ShadowStatus, SlotName, Version};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn version(name: &str) -> Version {
        Version {
            name: name.into(),
            version: "1.0".into(),
            sha256: "0123456789abcdef".into(),
            source: "admin".into(),
            ..Version::default()
        }
    }

    fn status() -> ProcessStatus {
        let dispatch = SlotStatus {
            slot: SlotName::Dispatch,
            active: version("current\x1b[2J"),
            previous: None,
            shadow: Some(ShadowStatus { version: version("candidate"), compared: 40, ..ShadowStatus::default() }),
            quarantine: Some((version("bad"), 12_400.0)),
            decisions: [90, 7, 3],
            deciding_s: 0.001,
            deciding_buckets: [0; 13],
            faults: vec![("trap".into(), 2), ("deadline".into(), 1)],
            strikes: 2,
            idle_plans: 0,
            swaps: 5,
            last_refusal: Some("not a component".into()),
        };
        ProcessStatus {
            kv: None,
            budget: None,
            pid: 4711,
            version: "0.1.0".into(),
            model: "Qwen3-8B".into(),
            uptime_s: 3723.0,
            requests: [3, 20, 5],
            phase_events: [28, 5, 1],
            waiting: 7,
            preemptions: [0, 4, 1],
            step_time_ms: Some([4.0, 0.02, 0.003]),
            slots: vec![dispatch],
            recording: None,
            problems: Vec::new(),
        }
    }

    fn view() -> View {
        View { address: "127.0.0.1:9465".into(), now: status(), before: None, problem: None }
    }

    fn frame(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| frame.render_widget(view, frame.area())).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_frame_shows_phases_queues_decisions_faults_and_versions() {
        let mut view = view();
        let first = frame(&view, 130, 30);
        for part in [
            "meridian 0.1.0  pid 4711  Qwen3-8B  up 1:02:03  127.0.0.1:9465",
            "think         20          4  ########################################",
            "waiting        7             ##############",
            "step     4.000 ms, 0.0200 ms a decode token, 0.0030 ms a prefill token",
            r"dispatch  current\u{1b}[2J 1.0 01234567             100        -   90.0%    7.0%     3.0%     10.0      3       2     5",
            "dispatch  candidate 1.0 01234567  correlation 0.000, overlap 0.000, differences 0, compared 40",
            "dispatch  quarantine: bad 1.0 01234567, tried again in 12 s",
            "dispatch  faults: trap 2, deadline 1",
            "dispatch  refused: not a component",
            "q quits",
        ] {
            assert!(first.contains(part), "{part:?} is not in\n{first}");
        }
        let mut later = status();
        later.uptime_s += 2.0;
        later.slots[0].decisions = [140, 7, 3];
        view.update(Ok(later));
        let second = frame(&view, 130, 30);
        assert!(second.contains("150     25.0   93.3%"), "{second}");
        view.update(Err(anyhow::anyhow!("127.0.0.1:9465: cannot connect")));
        assert!(frame(&view, 130, 30).contains("127.0.0.1:9465: cannot connect"));
        // Another process: its counts are no continuation.
        view.update(Ok(ProcessStatus { pid: 1, ..status() }));
        assert!(view.before.is_none() && view.problem.is_none());
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        for (width, height) in [(1, 1), (0, 0), (20, 5), (300, 2)] {
            let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
            view().render(buffer.area, &mut buffer);
        }
        let nothing = View { now: ProcessStatus::default(), ..view() };
        assert!(nothing.text().iter().any(|line| line.contains("waiting")));
    }

    #[test]
    fn keys() {
        let key = |code, modifiers| KeyEvent::new(code, modifiers);
        assert!(quits(key(KeyCode::Char('q'), KeyModifiers::NONE)));
        assert!(quits(key(KeyCode::Char('c'), KeyModifiers::CONTROL)));
        assert!(!quits(key(KeyCode::Char('c'), KeyModifiers::NONE)));
        assert!(!quits(key(KeyCode::Enter, KeyModifiers::NONE)));
    }
}
