//! Figures and text as reports and tables show them.

/// A figure: whole counts without decimals, about three digits otherwise.
pub(crate) fn figure(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "-".to_owned()
    } else if size >= 1e12 || (size < 1e-3 && size > 0.0) {
        format!("{value:.1e}")
    } else if size >= 1000.0 {
        thousands(value)
    } else if value.fract() == 0.0 {
        format!("{value:.0}")
    } else if size >= 10.0 {
        format!("{value:.1}")
    } else if size >= 1.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.3}")
    }
}

fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.abs());
    let mut out = String::from(if value < 0.0 { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// For ticks of axes: 1.5k instead of 1,500.
pub(super) fn short(value: f64) -> String {
    let (scaled, suffix) = match value.abs() {
        size if size >= 1e12 => return format!("{value:.0e}"),
        size if size >= 1e9 => (value / 1e9, "G"),
        size if size >= 1e6 => (value / 1e6, "M"),
        size if size >= 1e3 => (value / 1e3, "k"),
        size if size < 1e-4 && size > 0.0 => return format!("{value:.0e}"),
        _ => (value, ""),
    };
    // Sums of steps such as 0.1 are not exact.
    let text = format!("{scaled:.4}");
    format!("{}{suffix}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// Text from a file with nothing in it that could steer a terminal or turn the direction of the text around it.
pub(crate) fn clean(text: &str) -> String {
    meridian_core::text::printable(text).into_owned()
}

/// [`clean`], cut to that many characters.
pub(super) fn cut(text: &str, most: usize) -> String {
    let text = clean(text);
    if text.chars().count() <= most {
        return text;
    }
    text.chars().take(most.saturating_sub(1)).chain(['\u{2026}']).collect()
}

/// For HTML and SVG, between tags and in attributes within double quotes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in clean(text).chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// A name must not end its cell of a Markdown table, nor be markup.
pub(crate) fn escape_markdown(text: &str) -> String {
    let mut out = String::new();
    for c in clean(text).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '\\' | '|' | '`' | '*' | '_' | '[' | ']' | '!' | '~' | '$' | '#' => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
    out
}

/// Columns of text: the first so many to the left, the others to the right, a line under the first row.
pub(crate) fn aligned(rows: &[Vec<String>], to_the_left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |at: usize| rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|at| width(at).unwrap_or(0)).collect();
    let line = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(at, (cell, &width))| {
            if at < to_the_left { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(line).collect();
    let longest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    lines.insert(1.min(lines.len()), "-".repeat(longest));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        let shown = [0.0, 12.0, 0.93456, 3.333, 42.42, 1234567.8, -1500.0, 0.00001, f64::NAN, 2e15].map(figure);
        assert_eq!(shown, ["0", "12", "0.935", "3.33", "42.4", "1,234,568", "-1,500", "1.0e-5", "-", "2.0e15"]);
        assert_eq!([1500.0, 0.30000000000000004, 2e6, 0.0].map(short), ["1.5k", "0.3", "2M", "0"]);
    }

    #[test]
    fn hostile_text() {
        assert_eq!(
            escape("<a b=\"c\" d='e'>&\u{1b}[2J\u{202e}"),
            "&lt;a b=&quot;c&quot; d=&#39;e&#39;&gt;&amp;\\u{1b}[2J\\u{202e}"
        );
        assert_eq!(cut("abcdef", 4), "abc\u{2026}");
    }
}
