//! Recounts the books from scratch.

use std::collections::{HashMap, HashSet};

use meridian_core::{BlockId, BlockTier};

use super::pool::Pool;
use super::record::view;
use crate::BlockLocation;

#[derive(Default)]
struct Readers {
    views: [u32; 3],
    ids: u64,
    last: u64,
}

/// The first count that a recount contradicts, in words.
pub(super) fn audit(pool: &Pool) -> Result<(), String> {
    let mut readers: HashMap<BlockId, Readers> = HashMap::with_capacity(pool.blocks.len());
    for (request, live) in &pool.requests {
        let mut chained = 0;
        for (section, id) in live.chain() {
            chained += 1;
            if !live.members.contains(&id) {
                return Err(format!("request {request} has block {id} in its chain but not in its set"));
            }
            let readers = readers.entry(id).or_default();
            readers.views[view(live.phase, section) as usize] += 1;
            readers.ids ^= request.0;
            readers.last = request.0;
        }
        same(&format!("set of request {request}"), live.members.len(), chained)?;
    }
    let mut unshared: HashMap<u64, u32> = HashMap::new();
    for readers in readers.values().filter(|readers| readers.views.iter().sum::<u32>() == 1) {
        *unshared.entry(readers.last).or_default() += 1;
    }
    for (request, live) in &pool.requests {
        let counted = unshared.get(&request.0).copied().unwrap_or(0);
        same(&format!("unshared blocks of request {request}"), live.unshared, counted)?;
    }

    pool.cached.audit()?;
    pool.remote.audit()?;
    let ranked: HashSet<BlockId> = pool.cached.iter().map(|place| place.block).collect();
    same("blocks in the order of eviction", ranked.len(), pool.cached.iter().count())?;
    let mut indices: HashSet<u32> = pool.returned.iter().copied().collect();
    same("distinct returned device blocks", indices.len(), pool.returned.len())?;
    let (mut attended, mut think_attended, mut cached) = (0, 0, 0);
    let mut remote: HashSet<BlockId> = pool.remote.iter().map(|place| place.block).collect();
    same("blocks in the order of remote eviction", remote.len(), pool.remote.len() as usize)?;
    for (id, block) in &pool.blocks {
        let counted = readers.remove(id).unwrap_or_default();
        same(&format!("views of block {id}"), block.views, counted.views)?;
        same(&format!("readers of block {id}"), block.reader_ids, counted.ids)?;
        attended += u32::from(block.readers() > 0);
        think_attended += u32::from(block.views[BlockTier::ThinkActive as usize] > 0);
        let is_cached = match block.place {
            BlockLocation::Device { index } => {
                if index >= pool.fresh || !indices.insert(index) {
                    return Err(format!("device block {index} of block {id} is free or used twice"));
                }
                block.readers() == 0
            }
            BlockLocation::Remote { .. } => {
                if !remote.remove(id) || !pool.remote.contains(&block.place(*id)) {
                    return Err(format!("remote block {id} is not in its order of eviction"));
                }
                if block.readers() > 0 {
                    return Err(format!("remote block {id} is attended"));
                }
                false
            }
        };
        cached += u32::from(is_cached);
        if is_cached != ranked.contains(id) {
            return Err(format!("block {id} is cached: {is_cached}, in the order of eviction: {}", !is_cached));
        }
        if block.readers() == 0 && block.cached_tier == BlockTier::OutputCritical {
            return Err(format!("block {id} is output-critical and nobody attends it"));
        }
    }
    if let Some(id) = readers.keys().next() {
        return Err(format!("a chain names block {id}, which does not exist"));
    }
    same("attended blocks", pool.attended, attended)?;
    same("blocks that thinking attends", pool.think_attended, think_attended)?;
    if let Some(id) = remote.iter().next() {
        return Err(format!("block {id} is in the order of remote eviction and is not remote"));
    }
    let holders = pool.requests.values().filter(|live| live.holds_as_thinking()).count();
    same("requests that hold blocks and do not answer", pool.think_holders as usize, holders)?;
    same("cached blocks", pool.cached.len(), cached)?;
    same("all device blocks", pool.capacity, pool.free_count() + cached + attended + pool.reserved)?;
    Ok(())
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, booked: T, counted: T) -> Result<(), String> {
    if booked == counted { Ok(()) } else { Err(format!("{what}: booked {booked:?}, counted {counted:?}")) }
}
