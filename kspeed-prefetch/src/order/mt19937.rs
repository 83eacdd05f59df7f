//! The Mersenne Twister (Matsumoto and Nishimura, "Mersenne Twister: a
//! 623-dimensionally equidistributed uniform pseudo-random number generator",
//! 1998), with the seeding of the authors' 2002 version.

/// Words of state.
pub(crate) const N: usize = 624;
pub(crate) const M: usize = 397;
/// Multiplier of the seeding.
pub(crate) const SEED_MULTIPLIER: u32 = 1_812_433_253;

/// The generator.
#[derive(Clone)]
pub struct Mt19937 {
    state: [u32; N],
    at: usize,
}

/// One word of the next state.
#[inline(always)]
pub(crate) fn twist(this: u32, next: u32, far: u32) -> u32 {
    let y = (this & 0x8000_0000) | (next & 0x7fff_ffff);
    far ^ (y >> 1) ^ (0x9908_b0df & (y & 1).wrapping_neg())
}

/// A word of state as it is given out.
#[inline(always)]
pub(crate) fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

impl Mt19937 {
    /// Seeded with a number (`init_genrand`): PyTorch, and numpy's legacy seeds.
    #[must_use]
    pub fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let last = state[i - 1];
            state[i] = SEED_MULTIPLIER.wrapping_mul(last ^ (last >> 30)).wrapping_add(i as u32);
        }
        Self { state, at: N }
    }

    /// Seeded with words (`init_by_array`): Python. An empty key counts as `[0]`.
    #[must_use]
    pub fn by_array(key: &[u32]) -> Self {
        let key = if key.is_empty() { &[0][..] } else { key };
        let mut g = Self::new(19_650_218);
        let s = &mut g.state;
        let (mut i, mut j) = (1, 0);
        let mix = |last: u32| last ^ (last >> 30);
        for _ in 0..N.max(key.len()) {
            s[i] = (s[i] ^ mix(s[i - 1]).wrapping_mul(1_664_525))
                .wrapping_add(key[j])
                .wrapping_add(j as u32);
            i += 1;
            j = (j + 1) % key.len();
            if i == N {
                s[0] = s[N - 1];
                i = 1;
            }
        }
        for _ in 1..N {
            s[i] = (s[i] ^ mix(s[i - 1]).wrapping_mul(1_566_083_941)).wrapping_sub(i as u32);
            i += 1;
            if i == N {
                s[0] = s[N - 1];
                i = 1;
            }
        }
        s[0] = 0x8000_0000;
        g
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.at == N {
            let s = &mut self.state;
            for i in 0..N - M {
                s[i] = twist(s[i], s[i + 1], s[i + M]);
            }
            for i in N - M..N - 1 {
                s[i] = twist(s[i], s[i + 1], s[i + M - N]);
            }
            s[N - 1] = twist(s[N - 1], s[0], s[M - 1]);
            self.at = 0;
        }
        let y = self.state[self.at];
        self.at += 1;
        temper(y)
    }
}
