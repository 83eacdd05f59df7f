//! Which objects eviction spares; kept over restarts.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use parking_lot::RwLock;

use crate::object::ObjectId;

pub(super) struct Pins {
    path: PathBuf,
    ids: RwLock<HashSet<ObjectId>>,
}

impl Pins {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join("pins");
        let text = match fs::read_to_string(&path) {
            Ok(t) => t,
            Err(e) if e.kind() == io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e),
        };
        let ids = text.lines().filter_map(|l| u128::from_str_radix(l, 16).ok()).map(ObjectId);
        Ok(Self { path, ids: RwLock::new(ids.collect()) })
    }

    pub(super) fn contains(&self, id: ObjectId) -> bool {
        self.ids.read().contains(&id)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ids.read().is_empty()
    }

    pub(super) fn set(&self, id: ObjectId, on: bool) -> io::Result<()> {
        let mut ids = self.ids.write();
        let changed = if on { ids.insert(id) } else { ids.remove(&id) };
        if changed {
            let text: String = ids.iter().map(|i| format!("{i}\n")).collect();
            let temp = self.path.with_extension("new");
            fs::write(&temp, text)?;
            fs::rename(&temp, &self.path)?;
        }
        Ok(())
    }
}
