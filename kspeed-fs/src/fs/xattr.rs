//! Extended attributes `user.kspeed.*`.

use super::FileSystem;
use crate::errno::FsError;
use crate::namespace::{Ino, Kind};

/// Attributes that can be read.
pub const NAMES: [&str; 4] =
    ["user.kspeed.cached", "user.kspeed.state", "user.kspeed.etag", "user.kspeed.pin"];

impl FileSystem {
    /// Value of an attribute.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn get_xattr(&self, ino: Ino, name: &str) -> Result<Vec<u8>, FsError> {
        if !NAMES.contains(&name) || self.attr(ino)?.attr.kind != Kind::File {
            return Err(FsError::NoAttribute);
        }
        let stage = self.stage(ino);
        let text = match name {
            "user.kspeed.cached" => match stage {
                Some(s) => s.look()?.size().to_string(),
                None => self.object(ino)?.cached_bytes().to_string(),
            },
            "user.kspeed.state" => match stage {
                Some(s) => self.writeback.as_ref().map_or("clean", |w| w.state_of(&s)).into(),
                None => "clean".into(),
            },
            "user.kspeed.etag" => self.namespace.object(ino)?.version.as_str().to_owned(),
            _ => u8::from(self.object(ino)?.is_pinned()).to_string(),
        };
        Ok(text.into_bytes())
    }

    /// Names of an inode's attributes.
    #[must_use]
    pub fn list_xattr(&self, ino: Ino) -> Vec<&'static str> {
        match self.attr(ino) {
            Ok(e) if e.attr.kind == Kind::File => NAMES.to_vec(),
            _ => Vec::new(),
        }
    }

    /// Sets an attribute: only `user.kspeed.pin`, to `1` or `0`.
    ///
    /// # Errors
    /// Another attribute or value.
    pub fn set_xattr(&self, ino: Ino, name: &str, value: &[u8]) -> Result<(), FsError> {
        if name != "user.kspeed.pin" {
            return Err(FsError::Unsupported("extended attributes other than user.kspeed.pin"));
        }
        let on = match value {
            b"1" => true,
            b"0" => false,
            _ => return Err(FsError::Invalid("user.kspeed.pin is 1 or 0")),
        };
        Ok(self.object(ino)?.pin(on)?)
    }
}
