//! docs/src/configuration.md is what `meridian config reference` prints. `MERIDIAN_BLESS=1` rewrites it.

use std::path::Path;

use meridian_core::config;

#[test]
fn the_committed_page_is_the_generated_one() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/configuration.md");
    let generated = config::reference();
    if std::env::var_os("MERIDIAN_BLESS").is_some_and(|value| value == "1") {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    for (number, (committed, generated)) in (1..).zip(committed.lines().zip(generated.lines())) {
        assert_eq!(committed, generated, "line {number} differs; rewrite the page with MERIDIAN_BLESS=1");
    }
    assert_eq!(committed.len(), generated.len(), "the page differs; rewrite it with MERIDIAN_BLESS=1");
}

#[test]
fn every_field_and_family_is_described() {
    let page = config::reference();
    for field in config::fields() {
        let (table, name) = field.path.rsplit_once('.').unwrap();
        assert!(!field.meaning.is_empty(), "{}: has no doc comment", field.path);
        let section = page.split_once(&format!("\n## `[{table}]`\n")).unwrap().1;
        let section = section.split("\n## ").next().unwrap();
        let row = section.lines().find(|line| line.starts_with(&format!("| `{name}` |"))).unwrap();
        assert!(row.ends_with(&format!("{} |", field.meaning.replace('|', "\\|"))), "{row}");
    }
    for family in meridian_core::ModelFamily::all() {
        assert!(page.contains(&format!("\n| `{}` |", family.name)), "{}", family.name);
    }
}
