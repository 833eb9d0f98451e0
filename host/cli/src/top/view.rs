//! A frame of `meridian top`. It fits into 80 columns; a wider terminal has longer bars.

use meridian_core::LevelCounts;
use meridian_core::latency::{Histogram, STEP_BUCKETS_S, StepKind, TenantLatency, WAIT_BUCKETS_S};
use meridian_engine::control::{FaultEntry, ProcessStatus, SlotStatus};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Widget};

use crate::ctl::{faults_text, shadow_text, version_text};
use crate::target::shown;

/// Columns of a frame that is printed as text.
const TEXT_WIDTH: u16 = 80;
/// Columns beside a bar, borders included.
const BESIDE_BAR: u16 = 44;
/// Latest faults that are shown.
const SHOWN_FAULTS: usize = 3;

/// What an engine said.
#[derive(Clone, Default)]
pub(super) struct Look {
    pub(super) status: ProcessStatus,
    /// Its faults, oldest first.
    pub(super) faults: Vec<FaultEntry>,
}

/// What is shown.
pub(super) struct View {
    address: String,
    now: Look,
    /// The look before, for rates.
    before: Option<ProcessStatus>,
    /// Why `now` is not of now.
    problem: Option<String>,
    /// Without colour.
    plain: bool,
}

/// The latencies of all tenants together.
pub(crate) fn all_tenants(tenants: &[TenantLatency]) -> TenantLatency {
    let mut all = TenantLatency::default();
    for of in tenants {
        all.queue.merge(&of.queue);
        all.ttft.merge(&of.ttft);
        all.ttfo.merge(&of.ttfo);
        all.ttot.merge(&of.ttot);
        all.think_itl.merge(&of.think_itl);
        all.output_itl.merge(&of.output_itl);
        all.e2e.merge(&of.e2e);
        all.think_tokens.merge(&of.think_tokens);
    }
    all
}

/// A time in seconds, in at most seven columns.
pub(crate) fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(s) if s < 0.001 => format!("{:.0} us", s * 1e6),
        Some(s) if s < 0.1 => format!("{:.1} ms", s * 1e3),
        Some(s) if s < 1.0 => format!("{:.0} ms", s * 1e3),
        Some(s) => format!("{s:.1} s"),
    }
}

impl View {
    pub(super) fn new(address: &str, now: Look, plain: bool) -> Self {
        Self { address: address.to_owned(), now, before: None, problem: None, plain }
    }

    pub(super) fn update(&mut self, asked: anyhow::Result<Look>) {
        match asked {
            Ok(now) => {
                // Another process may listen there by now.
                let same = now.status.pid == self.now.status.pid;
                let before = std::mem::replace(&mut self.now, now).status;
                self.before = same.then_some(before);
                self.problem = None;
            }
            Err(error) => self.problem = Some(shown(&format!("{error:#}"))),
        }
    }

    /// Seconds since the look before, on the clock of the process.
    fn seconds(&self) -> Option<f64> {
        let seconds = self.now.status.uptime_s - self.before.as_ref()?.uptime_s;
        (seconds > 0.0).then_some(seconds)
    }

    /// Decisions a second since the look before.
    fn rate(&self, slot: &SlotStatus) -> Option<f64> {
        let earlier = self.before.as_ref()?.slots.iter().find(|earlier| earlier.slot == slot.slot)?;
        let count = |slot: &SlotStatus| slot.decisions.iter().sum::<u64>();
        Some(float(count(slot).saturating_sub(count(earlier))) / self.seconds()?)
    }

    /// A histogram over all tenants: of the time since the look before, or since the start if nothing came since.
    fn recent(&self, of: fn(&TenantLatency) -> &Histogram) -> Histogram {
        let merged = |status: &ProcessStatus| of(&all_tenants(&status.latency)).clone();
        let now = merged(&self.now.status);
        let since = self.before.as_ref().map(|before| now.since(&merged(before)));
        since.filter(|since| since.count() > 0).unwrap_or(now)
    }

    fn head(&self) -> Line<'static> {
        let ProcessStatus { pid, version, model, uptime_s, .. } = &self.now.status;
        let (model, version) = (shown(model), shown(version));
        let text = format!(" meridian {version}  pid {pid}  {model}  up {}  {} ", clock(*uptime_s), self.address);
        Line::styled(text, Modifier::BOLD)
    }

    fn requests(&self, width: u16) -> Vec<Line<'static>> {
        let ProcessStatus { requests, waiting, preemptions, sessions, blocks, step_time_ms, .. } = &self.now.status;
        let most = requests.iter().chain([waiting]).copied().max().unwrap_or(0).max(1);
        let columns = u64::from(width.saturating_sub(BESIDE_BAR));
        let bar = |count: u64| "#".repeat(usize::try_from((count * columns).div_ceil(most)).unwrap_or(0));
        let heading_text = format!("{:<8}{:>6}{:>10}{:>9}{:>9}", "phase", "live", "preempted", "ITL p50", "p99");
        let mut lines = vec![heading(heading_text)];
        let gaps: [Option<Histogram>; 3] =
            [None, Some(self.recent(|of| &of.think_itl)), Some(self.recent(|of| &of.output_itl))];
        let phases = [("prefill", Color::Blue), ("think", Color::Magenta), ("output", Color::Green)];
        for (i, (phase, color)) in phases.into_iter().enumerate() {
            let [median, p99] =
                [0.5, 0.99].map(|share| time(gaps[i].as_ref().and_then(|gaps| gaps.quantile(&STEP_BUCKETS_S, share))));
            let counts = format!("{phase:<8}{:>6}{:>10}{median:>9}{p99:>9}  ", requests[i], preemptions[i]);
            lines.push(Line::from(vec![counts.into(), Span::styled(bar(requests[i]), color)]));
        }
        let waits = format!("{:<8}{waiting:>6}{:28}  ", "waiting", "");
        lines.push(Line::from(vec![waits.into(), Span::styled(bar(*waiting), Color::Yellow)]));
        let blocks = blocks.map_or_else(String::new, |[free, all]| format!(", {free} of {all} KV blocks free"));
        lines.push(Line::from(format!("sessions {sessions}{blocks}")));
        lines.extend(self.now.status.service_levels.iter().map(|level| self.level(level)));
        if let Some([fixed, decode, prefill]) = step_time_ms {
            lines.push(Line::from(format!(
                "step {fixed:.3} ms, {decode:.4} ms a decode token, {prefill:.4} ms a prefill token"
            )));
        }
        lines
    }

    /// How a service level is kept: since the look before, or since the start.
    fn level(&self, now: &LevelCounts) -> Line<'static> {
        let before =
            self.before.as_ref().and_then(|before| before.service_levels.iter().find(|of| of.name == now.name));
        let counts = |of: &LevelCounts| [of.ended[0], of.ended[1], of.refused];
        let before = before.map_or([0; 3], counts);
        let since = counts(now);
        let [kept, missed, refused] = [0, 1, 2].map(|i| since[i].saturating_sub(before[i]));
        let all = kept + missed + refused;
        let share = if all > 0 { format!("{:.0} %", 100.0 * float(kept) / float(all)) } else { "-".into() };
        let [can, cannot] = now.live;
        let late = if cannot > 0 { Color::Red } else { Color::Green };
        Line::from(vec![
            format!("level {:<18.18} in time {share:>5}, refused {refused:>5}, live {can:>5}, late ", shown(&now.name))
                .into(),
            Span::styled(cannot.to_string(), late),
        ])
    }

    fn latency(&self) -> Vec<Line<'static>> {
        if self.now.status.latency.is_empty() {
            return Vec::new();
        }
        let columns = |name: &str, count: String, times: [String; 4]| {
            let [median, p90, p99, mean] = times;
            format!("{name:<26}{count:>8}{median:>10}{p90:>10}{p99:>10}{mean:>10}")
        };
        let names = ["p50", "p90", "p99", "mean"].map(str::to_owned);
        let mut lines = vec![heading(columns("", "count".into(), names))];
        let mut row = |name: &str, histogram: &Histogram, bounds: &[f64]| {
            let count = histogram.count();
            let mean = (count > 0).then(|| histogram.sum / float(count));
            let [median, p90, p99] = [0.5, 0.9, 0.99].map(|share| time(histogram.quantile(bounds, share)));
            lines.push(Line::from(columns(name, count.to_string(), [median, p90, p99, time(mean)])));
        };
        row("queue", &self.recent(|of| &of.queue), &WAIT_BUCKETS_S);
        row("TTFT first token", &self.recent(|of| &of.ttft), &WAIT_BUCKETS_S);
        row("TTFO first output token", &self.recent(|of| &of.ttfo), &WAIT_BUCKETS_S);
        row("TTOT end of thinking to it", &self.recent(|of| &of.ttot), &WAIT_BUCKETS_S);
        row("request", &self.recent(|of| &of.e2e), &WAIT_BUCKETS_S);
        for ((_, kind), histogram) in StepKind::ALL.iter().zip(&self.now.status.steps) {
            if histogram.count() > 0 {
                row(&format!("{kind} step"), histogram, &STEP_BUCKETS_S);
            }
        }
        lines
    }

    fn slots(&self) -> Vec<Line<'static>> {
        let mut lines = vec![heading(format!(
            "{:<9}{:<24}{:>8}{:>9}{:>9}{:>7}{:>7}{:>5}",
            "slot", "active", "per s", "mean us", "fallback", "faults", "strike", "swap"
        ))];
        for slot in &self.now.status.slots {
            let SlotStatus { active, decisions, deciding_s, faults, strikes, swaps, .. } = slot;
            let total: u64 = decisions.iter().sum();
            let seconds: f64 = deciding_s.iter().sum();
            let mean_us = if total == 0 { "-".into() } else { format!("{:.1}", seconds * 1e6 / float(total)) };
            let rate = self.rate(slot).map_or_else(|| "-".into(), |rate| format!("{rate:.1}"));
            let faults: u64 = faults.iter().map(|(_, count)| count).sum();
            let name: String = version_text(active).chars().take(23).collect();
            let fallback = share(decisions[2], total);
            let text = format!(
                "{:<9}{name:<24}{rate:>8}{mean_us:>9}{fallback:>9}{faults:>7}{strikes:>7}{swaps:>5}",
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
        let shadows = self.now.status.slots.iter().filter_map(|slot| Some((slot.slot, slot.shadow.as_ref()?)));
        shadows.map(|(slot, shadow)| Line::from(format!("{:<9}{}", slot.label(), shadow_text(shadow)))).collect()
    }

    /// What an operator should look at.
    fn troubles(&self) -> Vec<Line<'static>> {
        let mut lines = Vec::new();
        for SlotStatus { slot, quarantine, faults, last_refusal, .. } in &self.now.status.slots {
            let slot = slot.label();
            if let Some((version, ms)) = quarantine {
                let text = format!("{slot:<9}quarantine: {}, tried again in {:.0} s", version_text(version), ms / 1e3);
                lines.push(Line::styled(text, Color::Red));
            }
            if faults.iter().any(|(_, count)| *count > 0) {
                lines.push(Line::from(format!("{slot:<9}faults: {}", faults_text(faults))));
            }
            if let Some(refusal) = last_refusal {
                lines.push(Line::from(format!("{slot:<9}refused: {}", shown(refusal))));
            }
        }
        for FaultEntry { slot, kind, detail, version, shadow, .. } in self.now.faults.iter().rev().take(SHOWN_FAULTS) {
            let whose = if *shadow { "shadow " } else { "" };
            let text =
                format!("{:<9}latest: {kind} of {whose}{}: {}", slot.label(), shown(&version.name), shown(detail));
            lines.push(Line::from(text));
        }
        lines
    }

    /// The boxes below the head, from top to bottom.
    fn boxes(&self, width: u16) -> Vec<(&'static str, Vec<Line<'static>>)> {
        let parts = [
            ("Requests", self.requests(width)),
            ("Latency", self.latency()),
            ("Slots", self.slots()),
            ("Shadow", self.shadows()),
            ("Faults", self.troubles()),
        ];
        parts.into_iter().filter(|(_, lines)| !lines.is_empty()).collect()
    }

    /// One frame, as tall as it needs to be.
    pub(super) fn text(&self) -> Vec<String> {
        let height = 2 + self.boxes(TEXT_WIDTH).iter().map(|(_, lines)| rows(lines) + 2).sum::<u16>();
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
        for (title, lines) in self.boxes(area.width) {
            let part = take(rows(&lines) + 2);
            Paragraph::new(lines).block(Block::bordered().title(title)).render(part, buffer);
        }
        let last = take(1);
        match &self.problem {
            Some(problem) => Line::styled(format!(" {problem}"), Color::Red).render(last, buffer),
            None => Line::styled(" q quits", Modifier::DIM).render(last, buffer),
        }
        if self.plain {
            for cell in &mut buffer.content {
                cell.fg = Color::Reset;
                cell.bg = Color::Reset;
            }
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
    use meridian_core::latency::TOKEN_BUCKETS;
    use meridian_engine::control::{ShadowStatus, SlotName, Version};
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

    fn histogram(bounds: &[f64], values: &[f64]) -> Histogram {
        let mut histogram = Histogram::new(bounds.len());
        values.iter().for_each(|value| histogram.observe(bounds, *value));
        histogram
    }

    fn status() -> ProcessStatus {
        let dispatch = SlotStatus {
            slot: SlotName::Dispatch,
            active: version("current\x1b[2J"),
            previous: None,
            shadow: Some(ShadowStatus { version: version("candidate"), compared: 40, ..ShadowStatus::default() }),
            quarantine: Some((version("bad"), 12_400.0)),
            decisions: [90, 7, 3],
            deciding_s: [0.001, 0.0, 0.0],
            deciding_buckets: [[0; 13]; 3],
            faults: vec![("trap".into(), 2), ("deadline".into(), 1)],
            strikes: 2,
            idle_plans: 0,
            swaps: 5,
            last_refusal: Some("not a component".into()),
        };
        let waits = |values: &[f64]| histogram(&WAIT_BUCKETS_S, values);
        let gaps = |values: &[f64]| histogram(&STEP_BUCKETS_S, values);
        let latency = TenantLatency {
            tenant: "a".into(),
            queue: waits(&[0.02, 0.02]),
            ttft: waits(&[0.2, 2.0]),
            ttfo: waits(&[3.0]),
            ttot: waits(&[0.02]),
            think_itl: gaps(&[0.018; 9]),
            output_itl: gaps(&[0.018]),
            e2e: waits(&[]),
            think_tokens: histogram(&TOKEN_BUCKETS, &[400.0]),
        };
        ProcessStatus {
            pid: 4711,
            version: "0.1.0".into(),
            model: "Qwen3-8B".into(),
            uptime_s: 3723.0,
            requests: [3, 20, 5],
            phase_events: [28, 5, 1],
            waiting: 7,
            preemptions: [0, 4, 1],
            step_time_ms: Some([4.0, 0.02, 0.003]),
            steps: vec![gaps(&[0.018; 4]), gaps(&[]), gaps(&[0.09])],
            latency: vec![latency],
            sessions: 6,
            blocks: Some([100, 512]),
            slots: vec![dispatch],
            ..ProcessStatus::default()
        }
    }

    fn look() -> Look {
        let fault = FaultEntry {
            slot: SlotName::Dispatch,
            now_ms: 1.0,
            kind: "trap".into(),
            detail: "unreachable\x07".into(),
            version: version("bad"),
            shadow: false,
            candidates: 3,
            batch: None,
        };
        Look { status: status(), faults: vec![fault] }
    }

    fn view() -> View {
        View::new("127.0.0.1:9465", look(), false)
    }

    fn frame(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| frame.render_widget(view, frame.area())).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn a_frame_of_80_columns_shows_phases_latency_slots_and_faults() {
        let mut view = view();
        let first = frame(&view, 80, 50);
        for part in [
            "meridian 0.1.0  pid 4711  Qwen3-8B  up 1:02:03  127.0.0.1:9465",
            "think       20         4  17.5 ms  20.0 ms  ##################################",
            "waiting      7                              #############",
            "sessions 6, 100 of 512 KV blocks free",
            "step 4.000 ms, 0.0200 ms a decode token, 0.0030 ms a prefill token",
            "TTFT first token                 2    250 ms     2.2 s     2.5 s     1.1 s",
            "mixed step                       1",
            r"dispatch current\u{1b}[2J 1.0 01        -     10.0     3.0%      3      2    5",
            "dispatch candidate 1.0 01234567  correlation 0.000, overlap 0.000,",
            "dispatch quarantine: bad 1.0 01234567, tried again in 12 s",
            "dispatch faults: trap 2, deadline 1",
            "dispatch refused: not a component",
            r"dispatch latest: trap of bad: unreachable\u{7}",
            "q quits",
        ] {
            assert!(first.contains(part), "{part:?} is not in\n{first}");
        }
        let mut later = look();
        later.status.uptime_s += 2.0;
        later.status.slots[0].decisions = [140, 7, 3];
        view.update(Ok(later));
        let second = frame(&view, 80, 50);
        assert!(second.contains("    25.0"), "{second}");
        view.update(Err(anyhow::anyhow!("127.0.0.1:9465: cannot connect")));
        assert!(frame(&view, 80, 50).contains("127.0.0.1:9465: cannot connect"));
        // Another process: its counts are no continuation.
        view.update(Ok(Look { status: ProcessStatus { pid: 1, ..status() }, ..look() }));
        assert!(view.before.is_none() && view.problem.is_none());
    }

    #[test]
    fn latencies_are_those_since_the_look_before() {
        let mut view = view();
        let mut later = look();
        later.status.uptime_s += 1.0;
        later.status.latency[0].ttft.observe(&WAIT_BUCKETS_S, 9.0);
        view.update(Ok(later));
        assert_eq!(view.recent(|of| &of.ttft).count(), 1);
        assert_eq!(view.recent(|of| &of.ttfo).count(), 1, "nothing since: all");
    }

    #[test]
    fn without_colour_every_cell_has_the_terminals_own() {
        let area = Rect::new(0, 0, 80, 50);
        let mut buffer = Buffer::empty(area);
        View::new("a", look(), true).render(area, &mut buffer);
        assert!(buffer.content.iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
        let mut coloured = Buffer::empty(area);
        view().render(area, &mut coloured);
        assert!(coloured.content.iter().any(|cell| cell.fg == Color::Magenta));
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        for (width, height) in [(1, 1), (0, 0), (20, 5), (300, 2)] {
            let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
            view().render(buffer.area, &mut buffer);
        }
        let nothing = View::new("a", Look::default(), false);
        assert!(nothing.text().iter().any(|line| line.contains("waiting")));
        assert!(view().text().iter().all(|line| line.chars().count() <= 80));
    }
}
