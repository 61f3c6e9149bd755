/* What one set of instructions has defined. */

#undef SET
#undef TARGET
#undef LANES
#undef FLOATS
#undef WORDS
#undef LOAD
#undef STORE
#undef SPREAD
#undef ADD_PRODUCT
#undef LOAD_WORDS
#undef LOW
#undef HIGH
#undef WHOLE_ROWS
#undef MOST_ROWS
#undef SUM_EACH
