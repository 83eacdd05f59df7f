//! Which ranks of a distributed sampler read here: of an order dealt out to
//! `world` ranks in turn, this node sees the places of its own ranks only.

/// The classes of places that are read here: place mod `world`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranks {
    world: u32,
    /// By remainder: read here.
    here: Vec<bool>,
    evidence: u32,
    looked: u32,
}

/// Largest world that is looked for.
const MAX_WORLD: u32 = 1024;
/// Reads before the first look.
const EVIDENCE: u32 = 128;
/// Reads of each class that make it one.
const PER_CLASS: u32 = 16;
/// A share above this is not worth the risk: three of four places.
const WORTH_PERCENT: u32 = 75;

impl Default for Ranks {
    fn default() -> Self {
        Self { world: 1, here: vec![true], evidence: EVIDENCE, looked: 0 }
    }
}

impl Ranks {
    /// Ranks in all, as far as known.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Of these, here.
    #[must_use]
    pub fn here(&self) -> u32 {
        self.here.iter().filter(|h| **h).count() as u32
    }

    /// Whether a place is one of ours.
    #[must_use]
    pub fn has(&self, place: u32) -> bool {
        self.here[(place % self.world) as usize]
    }

    /// A place was read that is none of ours: all are, until there is much more
    /// evidence.
    pub fn contradicted(&mut self) {
        *self = Self { evidence: self.evidence.saturating_mul(4), ..Self::default() };
    }

    /// Looks at the places read in this epoch, now and then.
    pub fn learn(&mut self, read: &mut dyn Iterator<Item = u32>, reads: u32) {
        if self.world > 1 || reads < self.evidence || reads < self.looked * 2 {
            return;
        }
        self.looked = reads;
        let places: Vec<u32> = read.collect();
        let mut best: Option<(u32, Vec<u32>)> = None;
        for world in 2..=MAX_WORLD.min(reads / PER_CLASS * 4) {
            let mut counts = vec![0u32; world as usize];
            for p in &places {
                counts[(p % world) as usize] += 1;
            }
            let classes = counts.iter().filter(|c| **c > 0).count() as u32;
            let (b, bw) = match &best {
                Some((w, c)) => (c.iter().filter(|c| **c > 0).count() as u32, *w),
                None => (WORTH_PERCENT, 100),
            };
            // A smaller share, and enough reads of each class.
            if classes * PER_CLASS <= reads && classes * bw < b * world {
                best = Some((world, counts));
            }
        }
        if let Some((world, counts)) = best {
            self.world = world;
            self.here = counts.into_iter().map(|c| c > 0).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(places: impl Iterator<Item = u32>) -> Ranks {
        let mut r = Ranks::default();
        let mut seen = Vec::new();
        for p in places {
            seen.push(p);
            if !r.has(p) {
                r.contradicted();
            }
            r.learn(&mut seen.iter().copied(), seen.len() as u32);
        }
        r
    }

    #[test]
    fn ranks_here_are_found() {
        for (world, here) in
            [(2u32, vec![1u32]), (8, vec![3]), (16, vec![8, 9, 10, 11]), (3, vec![0, 1])]
        {
            let r = after((0..20_000).filter(|p| here.contains(&(p % world))).take(1000));
            assert_eq!(r.world(), world);
            assert_eq!(r.here(), here.len() as u32);
            assert!((0..world).all(|p| r.has(p) == here.contains(&p)));
        }
    }

    #[test]
    fn workers_with_batches_are_not_taken_for_ranks_for_long() {
        // 16 workers, each at its own batch of 64.
        let places = (0..20u32).flat_map(|round| {
            (0..64).flat_map(move |i| (0..16).map(move |w| round * 1024 + w * 64 + i))
        });
        assert_eq!(after(places).world(), 1);
    }
}
