use std::fmt::Write;

use super::fields::fields;
use super::schema;
use super::values::inline;
use crate::ModelFamily;

const HEAD: &str = "\
<!-- Written by `meridian config reference`; edit host/core/src/config/ instead. -->

# Configuration

`meridian.toml` is looked up in this order: an explicit path, `$MERIDIAN_CONFIG`, `./meridian.toml`,
`~/.config/meridian/meridian.toml`. The first one that exists is read; an explicit path or `$MERIDIAN_CONFIG` that cannot
be read is an error. Without any file the defaults hold. An engine reads the file when it starts, and watches it: some
settings change at once, others need a restart. It is UTF-8, at most 1 MiB.

An unknown field, a wrong type or a value out of range is refused at start-up, in one line that names the dotted field, the
value and what was expected. The tables `policy.dispatch.config`, `policy.eviction.config` and `policy.budget.config` are
the policies' own. A path is relative to the folder of the file; `~` is not expanded.

<!-- commands: run -->
```sh
meridian config check                  # is the file valid, and does each field act
meridian config show meridian.toml     # effective values, and where each came from
meridian config schema                 # JSON Schema, for editors
```
";

/// The reference of `meridian.toml` in Markdown: `docs/src/configuration.md`.
#[must_use]
pub fn reference() -> String {
    let mut page = HEAD.to_owned();
    let mut table = "";
    for field in fields() {
        let (parent, name) = field.path.rsplit_once('.').expect("every field is in a table");
        if parent != table {
            table = parent;
            let about = schema::at(parent).and_then(|table| table["description"].as_str()).unwrap_or_default();
            let _ = write!(page, "\n## `[{table}]`\n\n{about}\n\n");
            page.push_str("| field | type | default | must be | meaning |\n|---|---|---|---|---|\n");
        }
        let cells = [&field.kind, &format!("`{}`", inline(&field.default)), &field.range, &field.meaning]
            .map(|cell| cell.replace('|', "\\|"));
        let [kind, default, range, meaning] = cells;
        let _ = writeln!(page, "| `{name}` | {kind} | {default} | {range} | {meaning} |");
    }
    page.push_str("\n## Model families\n\nWhat `model.family` may be. A field that the file sets itself wins.\n\n");
    page.push_str("| family | starts thinking | ends thinking | models, for example |\n|---|---|---|---|\n");
    for family in ModelFamily::all() {
        let texts = |markers: &[crate::FamilyMarker]| {
            markers.iter().map(|marker| code(&marker.text)).collect::<Vec<_>>().join(" or ")
        };
        let models = family.models.join(", ");
        let _ = writeln!(page, "| `{}` | {} | {} | {models} |", family.name, texts(&family.start), texts(&family.end));
    }
    page
}

/// A code span in a table cell; line ends shown as `\n`.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('\n', "\\n").replace('|', "\\|"))
}
