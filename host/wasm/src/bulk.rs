//! What bulk instructions may cost. The epoch stops code between instructions, but one `memory.fill` may touch the whole
//! memory, and nothing stops it once it has begun. So each call has fuel, and only bulk instructions consume it: a byte, or
//! a few for an element of a table, before the instruction begins. (A call of a function takes one unit too; the
//! compiler leaves no choice. It lasts longer than touching a byte.)

use wasmtime::{OperatorCost, VariableOperatorCost};

use crate::LoadError;

/// Bytes that bulk instructions of one call may touch for each tick of its deadline, 1 MiB a millisecond. The first touch
/// of a page costs the most: on small virtual machines filling fresh memory was measured at 0.6 to 4 MiB a millisecond.
pub const BULK_BYTES_PER_TICK: u64 = 512 << 10;

/// What an element of a table costs, in bytes: it is a pointer of 8, and setting it takes as long as filling 32, or 64
/// where a reference to a function must be made first.
const ELEMENT_BYTES: u8 = 32;
const NEW_ELEMENT_BYTES: u8 = 64;

/// Nothing costs anything but bulk instructions.
pub(crate) fn costs() -> Result<OperatorCost, LoadError> {
    let setup = |error: serde_json::Error| LoadError::Setup { detail: error.to_string() };
    // A field for each of hundreds of operators; the numbers are theirs, the table inside is that of the bulk ones.
    let mut costs = serde_json::to_value(OperatorCost::new()).map_err(setup)?;
    for cost in costs.as_object_mut().into_iter().flat_map(serde_json::Map::values_mut).filter(|cost| cost.is_number())
    {
        *cost = 0.into();
    }
    let mut costs: OperatorCost = serde_json::from_value(costs).map_err(setup)?;
    costs.variable = VariableOperatorCost {
        table_copy_per_element: ELEMENT_BYTES,
        table_fill_per_element: ELEMENT_BYTES,
        table_init_per_element: NEW_ELEMENT_BYTES,
        table_grow_per_element: ELEMENT_BYTES,
        ..VariableOperatorCost::new()
    };
    Ok(costs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_bulk_instructions_cost() {
        let costs = costs().unwrap();
        assert_eq!((costs.I32Add, costs.MemoryFill, costs.Call), (0, 0, 0));
        assert_eq!((costs.variable.memory_fill_per_byte, costs.variable.memory_copy_per_byte), (1, 1));
        assert_eq!((costs.variable.memory_init_per_byte, costs.variable.table_fill_per_element), (1, 32));
    }
}
