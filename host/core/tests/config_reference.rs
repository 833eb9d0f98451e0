//! docs/src/configuration.md is what `meridian config reference` prints. `MERIDIAN_BLESS=1` rewrites it.

use generated::assert_committed;
use meridian_core::config;

use crate::generated;

#[test]
fn the_committed_page_is_the_generated_one() {
    assert_committed("docs/src/configuration.md", &config::reference());
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
