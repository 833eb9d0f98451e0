//! Components whose time goes into what nothing stops: bulk instructions, growing, segments, giving memory back.

use super::component;

/// A component that does one such thing in every decision.
pub struct Bulk {
    /// What it does, and how much.
    pub name: String,
    /// The most memory that it may have, MiB.
    pub memory_mib: usize,
    /// Whether the bytes are too many for a deadline of 2 ms.
    pub is_too_much: bool,
    fields: String,
    decide: String,
}

const ANSWER: &str = "(call $answer (i32.const 4096) (local.get $candidates) (i32.const 0) (i32.const 0))";
/// Where there is nothing of the module's own.
const FROM: usize = 128 << 10;
/// Most bytes of one data segment here; `MAX_DATA_BYTES` bounds all of them.
const SEGMENT_MIB: usize = 16;
/// Elements of the table, as many as a table may have.
const ELEMENTS: usize = 20_000;

impl Bulk {
    /// The component's bytes.
    pub fn component(&self) -> Vec<u8> {
        let module = super::module("", &self.decide);
        component(&module.replacen("  (memory (export \"memory\") 32)\n", &self.fields, 1))
    }
}

fn pages(mib: usize) -> usize {
    mib << 4
}

/// Every kind at 1 to `memory_mib` MiB, in a memory of that size.
pub fn corpus(memory_mib: usize) -> Vec<Bulk> {
    let sizes = [1, 4, 16, 64, 1024].into_iter().filter(|mib| *mib <= memory_mib);
    sizes.flat_map(|mib| in_memory(memory_mib, mib)).chain(tables(memory_mib)).collect()
}

fn in_memory(memory_mib: usize, mib: usize) -> Vec<Bulk> {
    // The memory as large as it may be, and all of it but what comes before `FROM`, if that is asked for.
    let bytes = (mib << 20).min((memory_mib << 20) - FROM);
    let all = format!("  (memory (export \"memory\") {})\n", pages(memory_mib));
    let half = |share: usize| bytes / share;
    let bulk = |what: &str, fields: String, decide: String, is_too_much: bool| Bulk {
        name: format!("{what} {mib} MiB"),
        memory_mib,
        is_too_much,
        fields,
        decide,
    };
    let too_much = mib > 2;
    let mut all_of_them = vec![
        bulk(
            "memory.fill",
            all.clone(),
            format!("(memory.fill (i32.const {FROM}) (global.get $calls) (i32.const {bytes})) {ANSWER}"),
            too_much,
        ),
        bulk(
            "memory.copy",
            all.clone(),
            format!("(memory.copy (i32.const {}) (i32.const {FROM}) (i32.const {})) {ANSWER}", FROM + half(2), half(2)),
            mib > 4,
        ),
        bulk(
            "memory.grow",
            "  (memory (export \"memory\") 2)\n".into(),
            // A new instance every time.
            format!("(drop (memory.grow (i32.const {}))) unreachable", pages(mib) - 2),
            false,
        ),
        bulk(
            "memory.grow and memory.fill",
            "  (memory (export \"memory\") 2)\n".into(),
            format!(
                "(drop (memory.grow (i32.const {}))) (memory.fill (i32.const {FROM}) (i32.const 7) (i32.const {})) {ANSWER}",
                pages(mib) - 2,
                bytes - FROM
            ),
            too_much,
        ),
        bulk(
            "touching pages",
            format!("{all}  (global $at (mut i32) (i32.const {FROM}))\n"),
            format!(
                "(loop $l (i32.store (global.get $at) (i32.const 7))
                   (global.set $at (i32.add (global.get $at) (i32.const 4096)))
                   (br_if $l (i32.lt_u (global.get $at) (i32.const {bytes}))))
                 unreachable"
            ),
            false,
        ),
    ];
    if mib <= SEGMENT_MIB {
        let bytes = bytes - FROM;
        let text = "a".repeat(bytes);
        all_of_them.push(bulk(
            "memory.init",
            format!("{all}  (data $d \"{text}\")\n"),
            format!("(memory.init $d (i32.const {FROM}) (i32.const 0) (i32.const {bytes})) {ANSWER}"),
            too_much,
        ));
        // A new instance every time, of whose memory an image is made.
        all_of_them.push(bulk(
            "data segment",
            format!("{all}  (data (i32.const {FROM}) \"{text}\")\n"),
            "unreachable".into(),
            false,
        ));
        if memory_mib >= 64 {
            // Too far apart for an image, so copied.
            let at = (64 << 20) - bytes;
            all_of_them.push(bulk(
                "data segment without an image",
                format!("{all}  (data (i32.const 1024) \"a\") (data (i32.const {at}) \"{text}\")\n"),
                "unreachable".into(),
                false,
            ));
        }
    }
    all_of_them
}

fn tables(memory_mib: usize) -> Vec<Bulk> {
    let items = "$recurse ".repeat(ELEMENTS);
    let memory = "  (memory (export \"memory\") 32)\n";
    let full = format!("{memory}  (table $t {ELEMENTS} funcref) (elem $e func {items})\n");
    let again = |instruction: &str| format!("(loop $l {instruction} (br $l)) unreachable");
    let bulk = |what: &str, fields: &str, decide: String| Bulk {
        name: format!("{what} over and over"),
        memory_mib,
        is_too_much: true,
        fields: fields.to_owned(),
        decide,
    };
    let all = format!("(i32.const {ELEMENTS})");
    vec![
        bulk("table.fill", &full, again(&format!("(table.fill $t (i32.const 0) (ref.func $recurse) {all})"))),
        bulk("table.copy", &full, again(&format!("(table.copy $t $t (i32.const 0) (i32.const 0) {all})"))),
        bulk("table.init", &full, again(&format!("(table.init $t $e (i32.const 0) (i32.const 0) {all})"))),
        bulk(
            "table.grow",
            &format!("{memory}  (table $t 0 funcref) (elem declare func $recurse)\n"),
            again(&format!("(drop (table.grow $t (ref.func $recurse) {all}))")),
        ),
    ]
}
