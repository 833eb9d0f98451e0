//! A frame of `meridian top --handoff`.

use meridian_fleet::{AnsweringEngine, HandoffStatus};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Widget};

use super::time;
use crate::target::shown;

/// What the front of a handoff said.
pub(super) struct FrontView {
    now: HandoffStatus,
    /// The status before, for rates.
    before: Option<HandoffStatus>,
    /// Why `now` is not of now.
    problem: Option<String>,
}

impl FrontView {
    pub(super) fn new(now: HandoffStatus) -> Self {
        Self { now, before: None, problem: None }
    }

    pub(super) fn update(&mut self, asked: anyhow::Result<HandoffStatus>) {
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

    /// Answers begun a second since the look before.
    fn rate(&self, engine: &AnsweringEngine) -> Option<f64> {
        let before = self.before.as_ref()?;
        let earlier = before.engines.iter().find(|earlier| earlier.engine == engine.engine)?;
        let seconds = self.now.uptime_s - before.uptime_s;
        (seconds > 0.0).then(|| engine.handed_over.saturating_sub(earlier.handed_over) as f64 / seconds)
    }

    /// The frame as text, in 80 columns unless an address is long.
    pub(super) fn lines(&self) -> Vec<String> {
        let HandoffStatus { pid, uptime_s, requests, think_itl_ms, engines, first_engine } = &self.now;
        let ms = |ms: &Option<f64>| time(ms.map(|ms| ms / 1e3));
        let mut lines = vec![
            format!("handoff  pid {pid}  up {uptime_s:.0} s  {requests} requests  think ITL {}", ms(think_itl_ms)),
            String::new(),
            format!(
                "{:<22}{:>8}{:>8}{:>8}{:>7}{:>8}{:>8}",
                "engine that answers", "answers", "blocks", "total", "/s", "begin", "ITL"
            ),
        ];
        for engine in engines {
            let AnsweringEngine { engine: address, requests, blocks, handed_over, begin_ms, itl_ms, is_failing } =
                engine;
            let rate = self.rate(engine).map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
            let state = if *is_failing { "  failing" } else { "" };
            let (address, begin, itl) = (shown(address), ms(begin_ms), ms(itl_ms));
            lines.push(format!(
                "{address:<22}{requests:>8}{blocks:>8}{handed_over:>8}{rate:>7}{begin:>8}{itl:>8}{state}"
            ));
        }
        lines.push(String::new());
        let reasons = first_engine.iter().map(|(reason, count)| format!("{} {count}", shown(reason)));
        let reasons: Vec<String> = reasons.collect();
        let reasons = if reasons.is_empty() { "none".to_owned() } else { reasons.join(", ") };
        lines.push(format!("answered by the first engine: {reasons}"));
        lines.extend(self.problem.iter().map(|problem| format!("not current: {problem}")));
        lines
    }
}

impl Widget for &FrontView {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        let lines: Vec<Line<'_>> = self.lines().into_iter().map(Line::from).collect();
        Paragraph::new(lines).render(area, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame() {
        let status = |handed_over, uptime_s| HandoffStatus {
            pid: 7,
            uptime_s,
            requests: 40,
            think_itl_ms: Some(25.0),
            engines: vec![AnsweringEngine {
                engine: "127.0.0.1:8002".into(),
                requests: 3,
                blocks: 210,
                handed_over,
                begin_ms: Some(120.0),
                itl_ms: None,
                is_failing: true,
            }],
            first_engine: [("kept".to_owned(), 2)].into(),
        };
        let mut view = FrontView::new(status(30, 10.0));
        view.update(Ok(status(36, 12.0)));
        let lines = view.lines();
        assert_eq!(lines[0], "handoff  pid 7  up 12 s  40 requests  think ITL 25.0 ms");
        assert_eq!(lines[3], "127.0.0.1:8002               3     210      36    3.0  120 ms       -  failing");
        assert!(lines.iter().all(|line| line.len() <= 80));
        assert_eq!(lines[5], "answered by the first engine: kept 2");
        view.update(Err(anyhow::anyhow!("no answer")));
        assert_eq!(view.lines()[6], "not current: no answer");
    }
}
