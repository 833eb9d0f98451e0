//! Shipped policies keep to their floor in every cell of the kept grid, or their section of the README begins with the worst.

use std::path::Path;

use meridian_bench::grid::{Grid, OPPONENTS, below_floor, worst};

#[test]
fn shipped_policies_keep_to_the_floor_or_say_so_first() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("results/grid.json");
    let grid: Grid = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert!(grid.counted().count() > 10 && grid.policies().len() > 8);
    for policy in grid.policies() {
        assert!(!OPPONENTS.contains(&policy));
        assert_eq!(
            below_floor(policy).map(str::to_owned),
            worst(&grid, policy),
            "{policy}: the first line of its section"
        );
    }
}
