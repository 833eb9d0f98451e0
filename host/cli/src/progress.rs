//! Progress of long work, on a terminal.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A line on standard error while something takes so many seconds.
pub(crate) fn seconds(total: f64, doing: &str) -> ProgressBar {
    let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let template = format!("{{spinner}} {doing}: {{elapsed}} of {total} s");
    line.set_style(ProgressStyle::with_template(&template).expect("the template is valid"));
    line.enable_steady_tick(Duration::from_millis(200));
    line
}

/// A bar on standard error, shown where that is a terminal. `left` is what comes before the bar.
pub(crate) fn bar(length: u64, left: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(length), ProgressDrawTarget::stderr());
    let template = format!("{left} [{{bar:32}}] {{percent:>3}} % {{elapsed}}, {{eta}} left");
    bar.set_style(ProgressStyle::with_template(&template).expect("the template is valid").progress_chars("=> "));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}
