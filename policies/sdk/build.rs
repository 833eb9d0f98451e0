//! Writes the tables of the contract from `wit/`, which declares each column and each fact once: macros that hand a list to
//! another macro. The SDK makes its types and accessors from them, the host its conversions and recordings.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use wit_parser::{Docs, Interface, Resolve, Type, TypeDefKind};

/// Columns that the SDK reads into types of its own, and not as numbers.
const TYPED: [(&str, &str); 3] = [("dispatch", "phase"), ("dispatch", "state"), ("budget", "signal")];

fn main() {
    // The folder when it runs: a target folder that was copied from another checkout has the script with that one's path.
    let sdk = std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let wit = Path::new(&sdk).join("../../wit");
    println!("cargo::rerun-if-changed={}", wit.display());
    println!("cargo::rerun-if-changed=build.rs");
    let mut resolve = Resolve::default();
    let (package, _) = resolve.push_path(&wit).unwrap_or_else(|error| panic!("{}: {error:#}", wit.display()));
    let package = &resolve.packages[package];
    let version = package.name.version.as_ref().expect("the package has a version");
    let mut out = format!("/// Version of the contract, `wit/world.wit`.\npub const CONTRACT: &str = \"{version}\";\n");
    for (name, interface) in &package.interfaces {
        tables(&resolve, name, &resolve.interfaces[*interface], &mut out);
    }
    let path = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("contract.rs");
    std::fs::write(&path, out).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}

/// The lists of one interface: its columns, and the fields of each record.
fn tables(resolve: &Resolve, interface: &str, types: &Interface, out: &mut String) {
    for (name, id) in &types.types {
        match &resolve.types[*id].kind {
            TypeDefKind::Enum(cases) if name == "column" => {
                let case = |(name, docs): (&str, &Docs)| format!("{} {} {:?};", camel(name), snake(name), text(docs));
                let all: Vec<_> = cases.cases.iter().map(|case| (case.name.as_str(), &case.docs)).collect();
                let is_number = |(name, _): &(&str, &Docs)| !TYPED.contains(&(interface, name));
                let numbers = all.iter().copied().filter(is_number).map(case);
                let lists = [all.iter().copied().map(case).collect(), numbers.collect()];
                table(&format!("{interface}_columns"), &lists, out);
            }
            TypeDefKind::Record(record) => {
                let field = |field: &wit_parser::Field| {
                    format!("{} {} {:?};", snake(&field.name), rust_type(resolve, &field.ty), text(&field.docs))
                };
                table(&format!("{interface}_{}", snake(name)), &[record.fields.iter().map(field).collect()], out);
            }
            _ => {}
        }
    }
}

/// A macro that calls another with what it is given and the lists behind it.
fn table(name: &str, lists: &[Vec<String>], out: &mut String) {
    let lists: String = lists.iter().map(|list| format!("            [{}]\n", list.join("\n            "))).collect();
    let _ = write!(
        out,
        "#[doc(hidden)]\n#[macro_export]\nmacro_rules! __{name} {{\n    ($then:ident! $($given:tt)*) => {{\n        \
         $then! {{ $($given)*\n{lists}        }}\n    }};\n}}\n"
    );
}

fn rust_type(resolve: &Resolve, ty: &Type) -> String {
    match ty {
        Type::U32 => "u32".into(),
        Type::U64 => "u64".into(),
        Type::F32 => "f32".into(),
        Type::F64 => "f64".into(),
        Type::Id(id) => camel(resolve.types[*id].name.as_deref().unwrap_or("list")),
        other => camel(&format!("{other:?}")),
    }
}

fn text(docs: &Docs) -> &str {
    docs.contents.as_deref().unwrap_or_default().trim()
}

fn snake(name: &str) -> String {
    name.replace('-', "_")
}

fn camel(name: &str) -> String {
    let word = |word: &str| word[..1].to_ascii_uppercase() + &word[1..];
    name.split('-').map(word).collect()
}
