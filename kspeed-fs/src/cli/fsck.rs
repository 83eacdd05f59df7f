//! `kspeed fsck`: what a cache directory holds that is not uploaded.

use std::path::Path;

use super::Failure;
use crate::config::size_text;
use crate::writeback::journal::{JournalError, sync_dir};
use crate::writeback::{self, Found, Wish};

/// Looks at each source's journal and stage files. Exit code 0: all is there.
pub(super) fn fsck(cache_dir: &Path, repair: bool) -> Result<(), Failure> {
    let stage_dir = cache_dir.join("stage");
    if !stage_dir.is_dir() {
        let text = format!("{}: not a cache directory that was written to", cache_dir.display());
        return Err(Failure::failed(text));
    }
    let _lock = kspeed_cache::tier::lock_dir(cache_dir)?;
    let mut bad = 0;
    for found in writeback::find_all(&stage_dir)? {
        println!("{} ({})", found.origin, found.dir.display());
        bad += examine(&found)?;
        if let Err(JournalError::Damaged { line, .. }) = &found.journal
            && repair
        {
            let kept = cut(&found.dir, *line)?;
            println!("  repaired: {kept} lines are kept, the damaged journal is journal.damaged");
            bad -= 1;
        }
    }
    if bad == 0 {
        return Ok(());
    }
    Err(Failure::failed(format!("{bad} problems")))
}

/// Prints what is there; the number of problems.
fn examine(found: &Found) -> Result<u64, Failure> {
    let replayed = match &found.journal {
        Ok(r) => r,
        Err(e) => {
            println!("  {e}");
            return Ok(1);
        }
    };
    let mut bad = 0;
    if replayed.torn_bytes > 0 {
        println!(
            "  {} bytes at the journal's end are torn: never acknowledged",
            replayed.torn_bytes
        );
    }
    let mut named = Vec::new();
    for (key, e) in replayed.wishes.iter() {
        match &e.wish {
            Wish::File { stage, .. } => {
                named.push(*stage);
                match std::fs::metadata(writeback::stage::path_of(&found.dir, *stage)) {
                    Ok(m) => println!("  to upload  {key}  {}", size_text(m.len())),
                    Err(_) => println!("  uploaded or removed already  {key}"),
                }
            }
            Wish::Directory => println!("  to make    {key}"),
            Wish::Copy { from, .. } => println!("  to copy    {key}  from {}", from.key),
            Wish::Absent => println!("  to delete  {key}"),
        }
    }
    for (key, _) in &replayed.lost {
        println!("  LOST       {key}: written, not synced, and the machine went down");
        bad += 1;
    }
    for id in writeback::stage_files(&found.dir)? {
        if !named.contains(&id) {
            println!("  {id:016x}.stage was never acknowledged; the next mount removes it");
        }
    }
    Ok(bad)
}

/// Keeps the lines before the damaged one, and sets the files aside that only
/// later lines name: the next mount would remove them.
fn cut(dir: &Path, line: usize) -> std::io::Result<usize> {
    let path = dir.join("journal");
    let bytes = std::fs::read(&path)?;
    let kept: Vec<u8> =
        bytes.split_inclusive(|b| *b == b'\n').take(line - 1).flatten().copied().collect();
    let new = dir.join("journal.new");
    std::fs::write(&new, &kept)?;
    std::fs::File::open(&new)?.sync_all()?;
    std::fs::rename(&path, dir.join("journal.damaged"))?;
    std::fs::rename(&new, &path)?;
    let named: Vec<_> = match writeback::journal::replay(&kept, "") {
        Ok(r) => writeback::stage_files(dir)?
            .into_iter()
            .filter(|id| r.wishes.key_of(*id).is_some())
            .collect(),
        Err(_) => Vec::new(),
    };
    let aside = dir.join("unnamed");
    std::fs::create_dir_all(&aside)?;
    for id in writeback::stage_files(dir)?.into_iter().filter(|id| !named.contains(id)) {
        let from = writeback::stage::path_of(dir, id);
        std::fs::rename(&from, writeback::stage::path_of(&aside, id))?;
        println!(
            "  {id:016x}.stage is set aside in {}: the damaged lines tell its name",
            aside.display()
        );
    }
    sync_dir(dir)?;
    Ok(line - 1)
}
