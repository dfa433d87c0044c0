// 2^x and what activations are made of, written once over `Lanes` (layers.inl).

// 2^x for x up to 127 to about 3 ulp, exactly 0 from -126 down, NaN of NaN; the polynomial is 2^f's of degree 5 with the least relative error for |f| <= 1/2
inline Lanes exp2(Lanes x) {
    const Lanes n = Lanes::round(x), f = Lanes::sub(x, n);
    Lanes p = Lanes::set(1.3276472e-3f);
    p = Lanes::fma(p, f, Lanes::set(9.6755413e-3f));
    p = Lanes::fma(p, f, Lanes::set(5.5507133e-2f));
    p = Lanes::fma(p, f, Lanes::set(2.4022120e-1f));
    p = Lanes::fma(p, f, Lanes::set(6.9314697e-1f));
    p = Lanes::fma(p, f, Lanes::set(1.0f));
    return Lanes::exp_scale(x, p, n);
}

constexpr float kLog2e = 1.44269504088896341f;

// 1 / x of numbers from 1 to 2^125, to 1 ulp, NaN of NaN. A division of 16 lanes takes 16 cycles on Intel's processors, this 4; and a guess from the bits is the same on all of them.
inline Lanes reciprocal(Lanes x) {
    const Lanes one = Lanes::set(1.0f), less = Lanes::sub(Lanes::set(0.0f), x);
    Lanes guess = Lanes::guess_reciprocal(x), off = Lanes::fma(less, guess, one);  // 5 % off, then .05^3, then that squared
    guess = Lanes::fma(Lanes::fma(off, off, off), guess, guess);
    return Lanes::fma(Lanes::fma(less, guess, one), guess, guess);
}

// x / (1 + 2^u); x 2^-125 for u from 125 on (min gives its second argument where one is NaN)
inline Lanes damped(Lanes x, Lanes u) { return Lanes::mul(x, reciprocal(Lanes::add(Lanes::set(1.0f), exp2(Lanes::min(Lanes::set(125.0f), u))))); }

inline Lanes activate(Activation kind, Lanes x) {
    if (kind == Activation::SILU) return damped(x, Lanes::mul(x, Lanes::set(-kLog2e)));
    // x/2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3)
    const Lanes cube = Lanes::mul(Lanes::mul(x, x), x);
    const Lanes u = Lanes::mul(Lanes::set(0.7978845608028654f), Lanes::fma(Lanes::set(0.044715f), cube, x));
    return damped(x, Lanes::mul(u, Lanes::set(-2.0f * kLog2e)));
}
