//! The operators of a function body, without validating them.

use wasmparser::{
    BinaryReader, FrameKind, FrameStack, FunctionBody, Operator, Result, VisitOperator, for_each_visit_operator,
};

/// First byte of the vector operators, which the parser is built without.
const SIMD_PREFIX: u8 = 0xfd;
/// Set in the alignment of a memory argument that names its memory.
const NAMES_MEMORY: u32 = 1 << 6;

pub(crate) struct Operators<'a> {
    reader: BinaryReader<'a>,
}

impl<'a> Operators<'a> {
    pub(crate) fn new(body: &FunctionBody<'a>) -> Result<Self> {
        Ok(Self { reader: body.get_binary_reader_for_operators()? })
    }

    /// The next operator, `Some(None)` for a vector operator; none of those has to do with control flow.
    pub(crate) fn next(&mut self) -> Result<Option<Option<Operator<'a>>>> {
        if self.reader.eof() {
            return Ok(None);
        }
        if self.reader.clone().read_u8()? != SIMD_PREFIX {
            return self.reader.visit_operator(&mut ToOperator).map(|operator| Some(Some(operator)));
        }
        self.reader.read_u8()?;
        skip_vector_operator(&mut self.reader)?;
        Ok(Some(None))
    }
}

/// Skip the immediates of a vector operator. Codes: WebAssembly core specification 3.0, binary format of instructions.
fn skip_vector_operator(reader: &mut BinaryReader<'_>) -> Result<()> {
    match reader.read_var_u32()? {
        // Loads and stores.
        0..=11 | 92 | 93 => skip_memory_argument(reader),
        // A constant, or the lanes of a shuffle.
        12 | 13 => reader.read_bytes(16).map(drop),
        // A lane.
        21..=34 => reader.read_u8().map(drop),
        // A load or store of a lane.
        84..=91 => {
            skip_memory_argument(reader)?;
            reader.read_u8().map(drop)
        }
        _ => Ok(()),
    }
}

fn skip_memory_argument(reader: &mut BinaryReader<'_>) -> Result<()> {
    if reader.read_var_u32()? & NAMES_MEMORY != 0 {
        reader.read_var_u32()?;
    }
    reader.read_var_u64().map(drop)
}

struct ToOperator;

macro_rules! to_operator {
    ($(@$proposal:ident $operator:ident $({ $($field:ident: $type:ty),* })? => $visit:ident ($($arity:tt)*))*) => {
        $(
            fn $visit(&mut self $($(, $field: $type)*)?) -> Operator<'a> {
                Operator::$operator $({ $($field),* })?
            }
        )*
    };
}

impl<'a> VisitOperator<'a> for ToOperator {
    type Output = Operator<'a>;
    for_each_visit_operator!(to_operator);
}

/// Whether `else` and `end` are where they may be is for validation to say.
impl FrameStack for ToOperator {
    fn current_frame(&self) -> Option<FrameKind> {
        Some(FrameKind::If)
    }
}
