//! Every public type of the crate has an example in its documentation.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("a folder can be read").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_public_type_has_an_example() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut files);
    let (mut types, mut without) = (0, Vec::new());
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let is_type = ["pub struct ", "pub enum ", "pub trait "].iter().any(|start| line.starts_with(start));
            if !is_type {
                continue;
            }
            types += 1;
            let above =
                lines[..number].iter().rev().take_while(|line| line.starts_with("///") || line.starts_with('#'));
            if !above.into_iter().any(|line| line.starts_with("/// ```")) {
                without.push(format!("{}:{}: {line}", file.display(), number + 1));
            }
        }
    }
    assert!(types > 60, "{types} types were found");
    assert!(without.is_empty(), "no example:\n{}", without.join("\n"));
}
