//! What a component may be made of, looked at before it is compiled: a few kilobytes can keep a compiler busy for hours, and
//! where it runs on a thread it cannot be stopped.
//!
//! Every limit has a margin over the largest components that are known to work, whole interpreters: CPython
//! (componentize-py, 18 MB) and SpiderMonkey (componentize-js, 12 MB). A policy in Rust is a hundredth of those. "Largest
//! known" below is the greater of the two; `docs/src/security.md` has what the worst component within the limits costs.

use wasmparser::{
    BinaryReader, ComponentInstance, ComponentType, CompositeInnerType, ElementItems, Encoding, FunctionBody,
    InstanceTypeDeclaration, Operator, Parser, Payload, Result,
};

use crate::LoadError;
use crate::error::one_line;
use crate::limiter::MAX_TABLE_ELEMENTS;
use crate::operators::Operators;
use crate::runtime::MAX_MEMORY_BYTES;
use crate::wit::clip;

/// Core modules, nested ones included. Largest known: 38, one for each shared library of CPython.
pub const MAX_CORE_MODULES: u64 = 128;
/// Components and modules inside each other. Largest known: 2; composing adds one or two.
pub const MAX_NESTING: u64 = 8;
/// Items of a component (instances, aliases, types, functions, imports, exports), those of a nested one counted as often
/// as it may be instantiated: every component that instantiates another twice doubles the work. Largest known: 1,900.
pub const MAX_COMPONENT_ITEMS: u64 = 100_000;
/// Instance types that declare each other, a level each: wasmtime's parser recurses over them, and a thread that runs out of
/// its stack ends the process. Largest known: 1.
pub const MAX_TYPE_NESTING: u64 = 32;
/// Types of all core modules: each signature gets trampolines, 0.16 ms. Largest known: 1,326.
pub const MAX_CORE_TYPES: u64 = 5_000;
/// Parameters of a function or block; each call or branch copies them. Largest known: 18.
pub const MAX_PARAMETERS: u64 = 64;
/// Results of a function or block. Largest known: 1.
pub const MAX_RESULTS: u64 = 16;
/// Functions of all core modules; the smallest takes 0.06 ms and 5 KB. Largest known: 13,488.
pub const MAX_FUNCTIONS: u64 = 40_000;
/// Code of all functions, bytes; a megabyte takes about 10 s. Largest known: 9.2 MB.
pub const MAX_CODE_BYTES: u64 = 16 << 20;
/// Code of one function, bytes; each takes about 1.3 KB of memory while it is compiled. Largest known: 427 KB.
pub const MAX_FUNCTION_BYTES: u64 = 768 << 10;
/// Sum over all functions of the code's length squared: values that live together make allocating registers quadratic.
/// Largest known: 2.4e11.
pub const MAX_CODE_WORK: u64 = 500_000_000_000;
/// Branches of one function x its locals, where a branch is a place where control flow parts or meets: a value may have to
/// be carried across each, and allocating registers is quadratic in that or worse. Largest known: 536,000.
pub const MAX_CARRIED_VALUES: u64 = 800_000;
/// Sum over all functions of the same, squared. Largest known: 8.6e11.
pub const MAX_BRANCH_WORK: u64 = 1_500_000_000_000;
/// Parameters and locals of one function. Largest known: 273.
pub const MAX_LOCALS: u64 = 2_000;
/// Loops inside each other: a value counts four times as much in each, until it counts as infinite and allocating
/// registers goes in circles. Largest known: 6.
pub const MAX_LOOP_DEPTH: u64 = 32;
/// Imports of all core modules. Largest known: 2,387.
pub const MAX_CORE_IMPORTS: u64 = 20_000;
/// Exports of all core modules. Largest known: 4,451.
pub const MAX_CORE_EXPORTS: u64 = 20_000;
/// Globals of all core modules. Largest known: 871.
pub const MAX_GLOBALS: u64 = 10_000;
/// Memories that core modules define; an instance may have one. Largest known: 1.
pub const MAX_MEMORIES: u64 = 4;
/// Tables that core modules define. Largest known: 2.
pub const MAX_TABLES: u64 = 8;
/// Elements that the tables begin with; their images are made when compiling. Largest known: 7,688.
pub const MAX_INITIAL_ELEMENTS: u64 = MAX_TABLE_ELEMENTS as u64;
/// Items of all element segments. Largest known: 7,700.
pub const MAX_SEGMENT_ELEMENTS: u64 = 100_000;
/// Data segments of all core modules. Largest known: 10,000.
pub const MAX_DATA_SEGMENTS: u64 = 50_000;
/// Memory that a module begins with, MiB: the largest `memory_mib`.
const MAX_MEMORY_MIB: u64 = (MAX_MEMORY_BYTES >> 20) as u64;
const PAGES_OF_MIB: u64 = 16;
/// Bytes of all data segments; an image of the memory is made of them. Largest known: 11.0 MB.
pub const MAX_DATA_BYTES: u64 = 24 << 20;

/// What the function body's fixed values (the context, limits of the memory) add to its locals.
const FIXED_VALUES: u64 = 4;

/// First bytes of types that have declarations inside. Codes: component model, binary format of types.
const COMPONENT_TYPE: u8 = 0x41;
const INSTANCE_TYPE: u8 = 0x42;
/// First byte of a declaration of a type.
const TYPE_DECLARATION: u8 = 0x01;

/// Refuse a component that would take too much to compile, or that imports anything. Whether it is valid is for wasmtime
/// to say; what cannot even be parsed is refused here.
pub(crate) fn check(bytes: &[u8]) -> std::result::Result<(), LoadError> {
    match (Survey { bytes, ..Survey::default() }).component() {
        Ok(()) => Ok(()),
        Err(Refusal::Parse(error)) => Err(LoadError::Invalid { detail: one_line(&error) }),
        Err(Refusal::Import(import)) => Err(LoadError::UnknownImport { import: clip(import, 128) }),
        Err(Refusal::TooMuch { what, found, limit }) => {
            Err(LoadError::TooComplex { what: what.to_owned(), found, limit })
        }
    }
}

enum Refusal {
    Parse(wasmparser::Error),
    Import(String),
    TooMuch { what: &'static str, found: u64, limit: u64 },
}

impl From<wasmparser::Error> for Refusal {
    fn from(error: wasmparser::Error) -> Self {
        Self::Parse(error)
    }
}

fn at_most(what: &'static str, found: u64, limit: u64) -> std::result::Result<(), Refusal> {
    if found > limit { Err(Refusal::TooMuch { what, found, limit }) } else { Ok(()) }
}

/// A sum with its limit.
#[derive(Default)]
struct Count(u64);

impl Count {
    fn add(&mut self, what: &'static str, more: u64, limit: u64) -> std::result::Result<(), Refusal> {
        self.0 = self.0.saturating_add(more);
        at_most(what, self.0, limit)
    }
}

/// The sums so far, over all modules.
#[derive(Default)]
struct Survey<'a> {
    bytes: &'a [u8],
    core_modules: Count,
    core_types: Count,
    functions: Count,
    code_bytes: Count,
    code_work: Count,
    branch_work: Count,
    core_imports: Count,
    core_exports: Count,
    globals: Count,
    memories: Count,
    tables: Count,
    initial_elements: Count,
    segment_elements: Count,
    data_segments: Count,
    data_bytes: Count,
    /// Items of the component with the most, of those read to their end.
    most_items: u64,
    /// Items so far of each module or component that is open, the outermost first.
    open: Vec<u64>,
    /// Of the module that is open, the parameters of each type and the type of each function.
    parameters: Vec<u64>,
    function_types: Vec<u32>,
    /// Bodies of it that were read.
    bodies: usize,
}

impl Survey<'_> {
    fn component(mut self) -> std::result::Result<(), Refusal> {
        for payload in Parser::new(0).parse_all(self.bytes) {
            self.payload(payload?)?;
        }
        Ok(())
    }

    fn payload(&mut self, payload: Payload<'_>) -> std::result::Result<(), Refusal> {
        match payload {
            Payload::Version { encoding, .. } => self.begin(encoding)?,
            Payload::End(_) => self.end()?,
            Payload::TypeSection(section) => {
                for group in section {
                    for ty in group?.into_types() {
                        self.core_types.add("core types", 1, MAX_CORE_TYPES)?;
                        let CompositeInnerType::Func(ty) = &ty.composite_type.inner else {
                            self.parameters.push(0);
                            continue;
                        };
                        at_most("parameters of a function", ty.params().len() as u64, MAX_PARAMETERS)?;
                        at_most("results of a function", ty.results().len() as u64, MAX_RESULTS)?;
                        self.parameters.push(ty.params().len() as u64);
                    }
                }
            }
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    import?;
                    self.core_imports.add("core imports", 1, MAX_CORE_IMPORTS)?;
                }
            }
            Payload::FunctionSection(section) => {
                self.functions.add("functions", section.count().into(), MAX_FUNCTIONS)?;
                self.function_types = section.into_iter().collect::<Result<_>>()?;
            }
            Payload::TableSection(section) => {
                self.tables.add("tables", section.count().into(), MAX_TABLES)?;
                for table in section {
                    self.initial_elements.add("elements of tables", table?.ty.initial, MAX_INITIAL_ELEMENTS)?;
                }
            }
            Payload::MemorySection(section) => {
                self.memories.add("memories", section.count().into(), MAX_MEMORIES)?;
                for memory in section {
                    at_most("memory_mib that it begins with", memory?.initial.div_ceil(PAGES_OF_MIB), MAX_MEMORY_MIB)?;
                }
            }
            Payload::GlobalSection(section) => self.globals.add("globals", section.count().into(), MAX_GLOBALS)?,
            Payload::ExportSection(section) => {
                self.core_exports.add("core exports", section.count().into(), MAX_CORE_EXPORTS)?;
            }
            Payload::ElementSection(section) => {
                for element in section {
                    let items = match element?.items {
                        ElementItems::Functions(items) => items.count(),
                        ElementItems::Expressions(_, items) => items.count(),
                    };
                    // One more, so that empty segments count too.
                    let items = u64::from(items) + 1;
                    self.segment_elements.add("items of element segments", items, MAX_SEGMENT_ELEMENTS)?;
                }
            }
            Payload::DataSection(section) => {
                self.data_segments.add("data segments", section.count().into(), MAX_DATA_SEGMENTS)?;
                for data in section {
                    self.data_bytes.add("bytes of data segments", data?.data.len() as u64, MAX_DATA_BYTES)?;
                }
            }
            Payload::CodeSectionEntry(body) => self.function(&body)?,
            Payload::InstanceSection(section) => self.items(section.count())?,
            Payload::CoreTypeSection(section) => self.items(section.count())?,
            Payload::ComponentAliasSection(section) => self.items(section.count())?,
            Payload::ComponentCanonicalSection(section) => self.items(section.count())?,
            Payload::ComponentImportSection(section) => {
                self.items(section.count())?;
                // Those of a component inside are for the one around it to fill.
                if let (1, Some(import)) = (self.open.len(), section.into_iter().next()) {
                    return Err(Refusal::Import(import?.name.name.to_owned()));
                }
            }
            Payload::ComponentExportSection(section) => self.items(section.count())?,
            Payload::ComponentInstanceSection(section) => {
                for instance in section {
                    let again = match instance? {
                        // Which component it is would take resolving aliases; it is one that was read before, because
                        // none can be imported (`component_type`).
                        ComponentInstance::Instantiate { .. } => self.most_items,
                        ComponentInstance::FromExports(_) => 0,
                    };
                    self.items_of(again.saturating_add(1))?;
                }
            }
            Payload::ComponentTypeSection(section) => {
                self.items(section.count())?;
                // Not `into_iter`, which recurses over what it reads.
                let range = section.range();
                let content = self.bytes.get(range.clone()).unwrap_or_default();
                component_types(&mut BinaryReader::new(content, range.start))?;
            }
            // The rest is nothing that is compiled, or something that wasmtime refuses.
            _ => {}
        }
        Ok(())
    }

    fn begin(&mut self, encoding: Encoding) -> std::result::Result<(), Refusal> {
        if encoding == Encoding::Module {
            self.core_modules.add("core modules", 1, MAX_CORE_MODULES)?;
            self.parameters.clear();
            self.function_types.clear();
            self.bodies = 0;
        }
        self.open.push(1);
        at_most("nested components and modules", self.open.len() as u64, MAX_NESTING)
    }

    fn end(&mut self) -> std::result::Result<(), Refusal> {
        let items = self.open.pop().unwrap_or(0);
        self.most_items = self.most_items.max(items);
        Ok(())
    }

    fn items(&mut self, more: u32) -> std::result::Result<(), Refusal> {
        self.items_of(more.into())
    }

    fn items_of(&mut self, more: u64) -> std::result::Result<(), Refusal> {
        let Some(items) = self.open.last_mut() else { return Ok(()) };
        *items = items.saturating_add(more);
        at_most("items of a component as it is instantiated", *items, MAX_COMPONENT_ITEMS)
    }

    fn function(&mut self, body: &FunctionBody<'_>) -> std::result::Result<(), Refusal> {
        let bytes = body.as_bytes().len() as u64;
        at_most("bytes of a function", bytes, MAX_FUNCTION_BYTES)?;
        self.code_bytes.add("bytes of all functions", bytes, MAX_CODE_BYTES)?;
        self.code_work.add("sum of squared bytes of the functions", bytes * bytes, MAX_CODE_WORK)?;
        // A body without a function, or a function without a type, is for wasmtime to refuse.
        let ty = self.function_types.get(self.bodies).map_or(0, |ty| *ty as usize);
        let mut locals = self.parameters.get(ty).copied().unwrap_or(0);
        self.bodies += 1;
        for group in body.get_locals_reader()? {
            locals = locals.saturating_add(group?.0.into());
        }
        at_most("locals of a function", locals, MAX_LOCALS)?;
        let branches = branches(body)?;
        let carried = branches.saturating_mul(locals + FIXED_VALUES);
        at_most("branches x locals of a function", carried, MAX_CARRIED_VALUES)?;
        self.branch_work.add("sum of squared branches x locals of the functions", carried * carried, MAX_BRANCH_WORK)
    }
}

/// The places of a function where control flow parts or meets.
fn branches(body: &FunctionBody<'_>) -> std::result::Result<u64, Refusal> {
    let mut branches: u64 = 0;
    // Of each open block, whether it is a loop.
    let mut blocks = Vec::new();
    let mut loops = 0;
    let mut operators = Operators::new(body)?;
    while let Some(operator) = operators.next()? {
        let Some(operator) = operator else { continue };
        branches += match operator {
            Operator::Block { .. } | Operator::If { .. } | Operator::TryTable { .. } => {
                blocks.push(false);
                1
            }
            Operator::Loop { .. } => {
                blocks.push(true);
                loops += 1;
                at_most("loops inside each other", loops, MAX_LOOP_DEPTH)?;
                1
            }
            Operator::End => {
                loops -= u64::from(blocks.pop() == Some(true));
                0
            }
            Operator::Else | Operator::Br { .. } | Operator::BrIf { .. } => 1,
            Operator::BrOnNull { .. } | Operator::BrOnNonNull { .. } => 1,
            // A table's element is made when it is first used: a call out of line and back, and dearer by measurement.
            Operator::CallIndirect { .. } | Operator::ReturnCallIndirect { .. } | Operator::TableGet { .. } => 8,
            Operator::BrTable { targets } => u64::from(targets.len()) + 1,
            _ => 0,
        };
    }
    Ok(branches)
}

/// Read a section of types without recursion, whatever is in it.
///
/// No type of a component, however deep: with one, a component could be handed to another, and what is instantiated how
/// often could not be told.
fn component_types(reader: &mut BinaryReader<'_>) -> std::result::Result<(), Refusal> {
    // What is still to be read of the section, and of each instance type that is open.
    let mut open = vec![reader.read_var_u32()?];
    while let Some(left) = open.last_mut() {
        let Some(fewer) = left.checked_sub(1) else {
            open.pop();
            continue;
        };
        *left = fewer;
        let is_type = open.len() == 1 || declares_type(reader)?;
        if !is_type {
            continue;
        }
        match reader.clone().read_u8()? {
            COMPONENT_TYPE => at_most("types of components", 1, 0)?,
            INSTANCE_TYPE => {
                reader.read_u8()?;
                at_most("types inside each other", open.len() as u64, MAX_TYPE_NESTING)?;
                open.push(reader.read_var_u32()?);
            }
            // No other type has types inside; they are named by number.
            _ => drop(reader.read::<ComponentType<'_>>()?),
        }
    }
    Ok(())
}

/// Read a declaration of an instance type up to its type, or to its end when it is none.
fn declares_type(reader: &mut BinaryReader<'_>) -> Result<bool> {
    match reader.clone().read_u8()? {
        TYPE_DECLARATION => {
            reader.read_u8()?;
            Ok(true)
        }
        // An alias, an export, or a core type: that of a module has none of its kind inside. No other is known.
        _ => reader.read::<InstanceTypeDeclaration<'_>>().map(|_| false),
    }
}
